"""Checks of the engines, of environment variables, and of what a request gets on this machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.checks_machine import INSTALL_WHEEL, dotted
from ep_a2a.commands.doctor.finding import Finding, error, note, ok, warning
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.commands.doctor.machine import Machine

PLUGIN, ATOM_PLUGIN = "ep_a2a", "ep_a2a_atom"
ATOM_LAUNCHER = "ep_a2a.integrations.atom.serve"
INSTALL = f"Install this package in vLLM's environment: {INSTALL_WHEEL}"
VLLM_STEP = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
VLLM_STEP_SECS = "300"
"""vLLM's own bound of a step, unless VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS says otherwise."""
SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "each launch blocks: steps are slow, and two steps on one rank cannot overlap",
    "CUDA_DEVICE_MAX_CONNECTIONS": "one queue for all streams: steps of two ops that overlap may wait for each other",
    "TRITON_INTERPRET": "an engine's own kernels are interpreted, ours are not",
}
"""Effects of variables that are 1: slow steps, or steps that wait for each other."""
FP8_CAPABILITY = (8, 9)
DOCUMENTED = "docs/env.md lists them all."
PORTABLE = "allgather_reducescatter"
USE_PORTABLE = f"Use the {PORTABLE} backend (EP_A2A_BACKEND={PORTABLE}), or other GPUs."
USE_ANOTHER = f"Use {PORTABLE}, or another backend: `ep-a2a backends` lists them."


# --- engines ---


def vllm(m: Machine) -> Finding:
    """Check that the plugin supports this vLLM."""
    version, problem = m.vllm.version, m.vllm.problem
    if version is None:
        return note("not in this environment")
    if problem:
        return error(f"{version}: {problem}", "Install a supported vLLM, or an ep-a2a that knows this one.")
    return ok(f"{version}; the plugin supports this version")


def vllm_plugins(m: Machine) -> Finding | None:
    """Check whether vLLM finds the plugin."""
    problem = _not_loaded(m, PLUGIN, m.installation.vllm_entry_point)
    return error(*problem) if problem else None


def atom(m: Machine) -> Finding:
    """Check what the switch does to ATOM, and whether it reaches ATOM as vLLM's plugin."""
    named = (("ATOM", m.atom.version), ("AITER", m.atom.aiter))
    versions = ", ".join(f"{name} {version}" for name, version in named if version)
    switch, backend = env.BACKEND.name, m.environment.get(env.BACKEND.name)
    if m.atom.version is None:
        return note(f"not in this environment; {versions}" if versions else "not in this environment")
    if m.atom.aiter is None:
        return error(f"{versions}, without AITER, from which it takes its managers", "Install AITER.")
    if not backend:
        remedy = f"To change that: {switch}=BACKEND python -m {ATOM_LAUNCHER} MODULE ... (docs/atom.md)"
        return note(f"{versions}; it runs as it is, since {switch} is not set", remedy)
    problem = _not_loaded(m, ATOM_PLUGIN, m.installation.atom_entry_point) if m.vllm.version else None
    if problem:
        return warning(f"{problem[0]}: the switch does not reach ATOM as vLLM's plugin", problem[1])
    reached = f"is for processes that {ATOM_LAUNCHER} or activate() reaches; this has not run in a server of ATOM yet"
    return note(f"{versions}; {switch}={backend} {reached}")


def _not_loaded(m: Machine, plugin: str, is_installed: bool) -> tuple[str, str] | None:
    """Returns why vLLM does not load a plugin, and the remedy; None where it does."""
    if not is_installed:
        return f"{plugin} is not among vLLM's plugins: vLLM does not know its backends", INSTALL
    allowed = m.environment.get("VLLM_PLUGINS", plugin)
    if plugin in allowed.split(","):
        return None
    found = f"VLLM_PLUGINS='{allowed}' does not name {plugin}; vLLM takes a blank for a part of a name"
    return found, f"Unset it, or add {plugin} without blanks."


# --- variables ---


def variables(m: Machine) -> Iterator[Finding]:
    """List the variables that are set, and check that those of this package exist and can be read."""
    yield ok(", ".join(f"{name}={value}" for name, value in m.environment.items()) or "none is set")
    for name, problem in m.variable_problems.items():
        yield error(problem, f"Correct or unset it; {DOCUMENTED}", name)
    known = [each.name for each in env.VARIABLES]
    for name in m.environment:
        if name.startswith(env.PREFIX) and name not in known:
            yield warning("no variable of this version: it does nothing", did_you_mean(name, known) or DOCUMENTED, name)


def timeout(m: Machine) -> Finding | None:
    """Check that kernels give up before vLLM does."""
    own, vllm_secs = m.environment.get(env.TIMEOUT_SECS.name), m.environment.get(VLLM_STEP, VLLM_STEP_SECS)
    is_read = own and env.TIMEOUT_SECS.name not in m.variable_problems and vllm_secs.isdecimal()
    if not m.vllm.version or not is_read or float(own or 0) < int(vllm_secs):
        return None
    found = f"{own} s: vLLM gives a step up after {vllm_secs} s, and cannot say which rank was missing"
    return warning(found, f"Lower it below {vllm_secs}.")


def rdma_devices(m: Machine) -> Finding | None:
    """Check that the RDMA devices which carry tokens are on this host."""
    value, devices = m.environment.get(env.RDMA_DEVICES.name, ""), sorted({port.device for port in m.rdma})
    named = [] if value.startswith("^") else filter(None, value.split(","))
    absent = ", ".join(each for each in named if each.strip() not in devices)
    if not absent:
        return None
    return error(f"no device {absent} on this host; there are: {', '.join(devices) or 'none'}", "Correct it.")


def switches(m: Machine) -> Iterator[Finding]:
    """Name variables of other software that make steps slow."""
    for name, effect in SWITCHES.items():
        if m.environment.get(name) == "1":
            yield warning(f"{name}=1: {effect}", "Unset it, unless it is meant.", subject=name)


# --- what a group gets ---


def backend(m: Machine) -> Iterator[Finding]:
    """Report the backend and who chose it, and check that it can be used here."""
    if m.choice.problem:
        yield error(m.choice.problem, m.choice.remedy)
        return
    yield ok(f"{m.choice.backend}: {m.choice.backend_reason}")
    # Without torch and Triton no backend can be asked.
    for problem in m.backend.problems if m.torch.works and m.triton.works else ():
        yield error(f"{m.backend.name}: {problem}", USE_ANOTHER)


def kernel(m: Machine) -> Finding:
    """Report what moves tokens, and why."""
    num_nodes, place = len(m.choice.ranks_per_node), "GPUs" if m.torch.num_gpus else "CPU processes"
    where = f"{sum(m.choice.ranks_per_node)} ranks on {num_nodes} node{'s' if num_nodes > 1 else ''}, on {place}"
    return ok(f"{m.choice.kernel}: {m.choice.kernel_reason}; {where}")


def sizes(m: Machine) -> Finding | None:
    """Check that the backend takes the requested sizes."""
    return error(m.backend.refusal, m.backend.remedy) if m.backend.refusal else None


def fp8(m: Machine) -> Finding | None:
    """Check that the GPUs can cast."""
    old = [gpu.name for gpu in m.driver.gpus if gpu.capability < FP8_CAPABILITY]
    if m.request.quant == "none" or not old:
        return None
    return error(f"no fp8 casts on {old[0]}, which need compute capability {dotted(FP8_CAPABILITY)}", "Use no cast.")


def nodes(m: Machine) -> Iterator[Finding]:
    """Check that ep_a2a's own kernels run between these nodes."""
    ranks = m.choice.ranks_per_node
    if len(set(ranks)) > 1:
        remedy = f"Start as many ranks on each node, or use {PORTABLE}."
        yield error(f"unlike numbers of ranks: {', '.join(map(str, ranks))}", remedy)
    if len(ranks) > 1 and m.torch.num_gpus:
        found = "between nodes, ep_a2a on GPUs has run on one host's virtual nodes only"
        yield warning(found, f"Or use {PORTABLE}.")


def reach(m: Machine) -> Iterator[Finding]:
    """Check that GPUs reach each other's memory, as ep_a2a's own kernels need."""
    for way, reached in (("peer access", m.driver.access), ("native atomics", m.driver.atomics)):
        numbers = range(len(reached))
        pairs = [f"{a} and {b}" for b in numbers for a in range(b) if not (reached[a][b] and reached[b][a])]
        if pairs:
            found = f"missing between GPUs {', '.join(pairs)}; ep_a2a's kernels need it (NVLink)"
            yield error(found, USE_PORTABLE, way)
        else:
            yield ok(f"between all {len(reached)} GPUs", subject=way)


def ranks(m: Machine) -> Finding | None:
    """Check that each rank has a GPU, or that the backend lets them share one."""
    num_gpus, most = m.torch.num_gpus, max(m.choice.ranks_per_node)
    if not 0 < num_gpus < most:
        return None
    if m.choice.backend == DEFAULT_BACKEND:
        return note(f"{most} on a node share {num_gpus} GPUs: right, and slower than with a GPU each")
    return error(f"{most} on a node, {num_gpus} GPUs here", "Start one rank per GPU.")


def memory(m: Machine) -> Finding:
    """Check that the memory an op needs is free."""
    most, num_gpus, needed = max(m.choice.ranks_per_node), m.torch.num_gpus, m.backend.needed_bytes
    if needed is None:
        return note("not known: `ep-a2a plan` counts what ep_a2a takes on one node, with --vllm for a model")
    if num_gpus:
        needed *= math.ceil(most / num_gpus)
        free = min((gpu.free_bytes for gpu in m.driver.gpus if gpu.free_bytes is not None), default=None)
        where, place = "each GPU", "on the fullest GPU"
    else:
        needed, free, where, place = needed * most, m.host.shared_memory.free_bytes, "this host", "in /dev/shm"
    if free is None:
        return note(f"{needed:,} bytes needed on {where}")
    found = f"{needed:,} bytes needed on {where}, {free:,} free {place}"
    return ok(found) if needed <= free else error(found, "Lower max_num_inp_token_per_rank, or free memory.")
