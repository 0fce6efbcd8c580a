"""Checks of the engines, of environment variables, and of what a request gets on this machine."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a import env
from ep_a2a.commands.doctor.checks_machine import FP8_CAPABILITY, INSTALL_WHEEL
from ep_a2a.commands.doctor.choice import PORTABLE, stands_on_library
from ep_a2a.commands.doctor.finding import Finding, error, note, ok, refused, warning
from ep_a2a.commands.doctor.machine import dotted
from ep_a2a.config.file import DEFAULT_BACKEND, read_config_file
from ep_a2a.config.transports import INTERNODE_TRANSPORTS
from ep_a2a.errors import EpA2AError, did_you_mean
from ep_a2a.managers.registry import check_backend_name
from ep_a2a.tuning.tables import NO_TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ep_a2a.commands.doctor.machine import Machine

PLUGIN, ATOM_PLUGIN = "ep_a2a", "ep_a2a_atom"
ATOM_LAUNCHER = "ep_a2a.integrations.atom.serve"
INSTALL = f"Install this package in vLLM's environment: {INSTALL_WHEEL}"
NO_SWITCH = "the switch does not reach ATOM as vLLM's plugin"
LEVELS = tuple(logging.getLevelNamesMapping())
VLLM_STEP = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
VLLM_STEP_SECS = 300
"""vLLM's own bound of a step, unless VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS says otherwise."""
SLOW_SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "each launch blocks: steps are slow, and two steps on one rank cannot overlap",
    "CUDA_DEVICE_MAX_CONNECTIONS": "one queue for all streams: steps of two ops that overlap may wait for each other",
    "NCCL_P2P_DISABLE": "NCCL goes by way of the host; ep_a2a's own kernels ignore it",
    "NCCL_IB_DISABLE": "NCCL does not use RDMA between nodes",
    "NCCL_SHM_DISABLE": "NCCL does not use shared memory inside a node",
}
"""Effects of variables that are 1: slow steps, or steps that wait for each other."""
DOCUMENTED = "docs/env.md lists them all."
USE_PORTABLE = f"Use the {PORTABLE} backend (EP_A2A_BACKEND={PORTABLE}), or other GPUs."
USE_ANOTHER = f"Use another backend: {DEFAULT_BACKEND}, or {PORTABLE}; `ep-a2a backends` lists them."
ROW_ALIGNMENT_BYTES = 16
GROUP_ELEMENTS = 128


# --- engines ---


def vllm(m: Machine) -> Finding:
    """Check that the plugin supports this vLLM."""
    version = m.vllm.version
    if version is None:
        return note("not in this environment")
    if m.vllm.version_problem:
        return error(m.vllm.version_problem, "Install a supported vLLM, or use another --all2all-backend.")
    if m.vllm.differences:
        remedy = "Install a supported vLLM, or an ep-a2a that knows this one."
        return error(f"{version}, in which {', '.join(m.vllm.differences)}", remedy)
    return ok(f"{version}; the plugin supports this version")


def vllm_plugins(m: Machine) -> Iterator[Finding]:
    """Check whether vLLM finds the plugin."""
    if not m.installation.vllm_entry_point:
        yield error("ep_a2a is not among them: vLLM will say that the backend's name is unknown", INSTALL)
    yield from _left_out(m, PLUGIN, error)


def atom(m: Machine) -> Finding:
    """Report ATOM, AITER and what the switch does to them."""
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
    reached = f"is for processes that {ATOM_LAUNCHER} or activate() reaches; this has not run inside ATOM yet"
    return note(f"{versions}; {switch}={backend} {reached}")


def atom_in_vllm(m: Machine) -> Iterator[Finding]:
    """Check whether the switch reaches ATOM as vLLM's plugin."""
    if not m.environment.get(env.BACKEND.name) or None in (m.atom.version, m.atom.aiter, m.vllm.version):
        return
    if not m.installation.atom_entry_point:
        yield warning(f"{ATOM_PLUGIN} is not among vLLM's plugins: {NO_SWITCH}", INSTALL)
    else:
        yield from _left_out(m, ATOM_PLUGIN, warning, f"; {NO_SWITCH}")


def _left_out(m: Machine, plugin: str, level: Callable[[str, str], Finding], effect: str = "") -> Iterator[Finding]:
    """Checks whether VLLM_PLUGINS keeps vLLM from a plugin: vLLM splits it at commas, and strips no blanks."""
    allowed = m.environment.get("VLLM_PLUGINS", plugin)
    names = allowed.split(",")
    if plugin in names:
        return
    if plugin in map(str.strip, names):
        found = f"VLLM_PLUGINS='{allowed}' has a blank beside {plugin}: vLLM takes it for another name{effect}"
        yield level(found, "Take it out.")
    else:
        yield level(f"VLLM_PLUGINS={allowed} does not name {plugin}{effect}", f"Unset it, or add {plugin} to it.")


# --- variables ---


def own_variables(m: Machine) -> Iterator[Finding]:
    """Check the EP_A2A_* variables, each under its own name."""
    own = dict.fromkeys(m.variable_problems, "") | {n: v for n, v in m.environment.items() if n.startswith(env.PREFIX)}
    found = [(name, _own_variable(m, name, value)) for name, value in own.items()]
    wrong = [Finding(one.level, one.found, one.remedy, name) for name, one in found if one is not None]
    yield from wrong or [ok(_listed(own) or "no EP_A2A_* is set")]


def _own_variable(m: Machine, name: str, value: str) -> Finding | None:
    """Returns what is wrong with one EP_A2A_* variable."""
    text, known = f"{name}={value}", [each.name for each in env.VARIABLES]
    if name in m.variable_problems:
        return error(f"{text}: {m.variable_problems[name]}", f"Correct or unset it; {DOCUMENTED}")
    if name not in known:
        remedy = did_you_mean(name, known) or DOCUMENTED
        return warning(f"{text} is no variable of this version: it does nothing", remedy)
    return VALUE_CHECKS[name](m, value) if value and name in VALUE_CHECKS else None


def _backend_variable(m: Machine, value: str) -> Finding | None:
    return _refusal(check_backend_name, value)


def _config_variable(m: Machine, value: str) -> Finding | None:
    return _refusal(
        lambda path: check_backend_name(read_config_file(path).get("all2all_backend", DEFAULT_BACKEND)), value
    )


def _refusal(check: Callable[[str], None], value: str) -> Finding | None:
    try:
        check(value)
    except EpA2AError as problem:
        return refused(problem)
    return None


def _transport_variable(m: Machine, value: str) -> Finding | None:
    text = f"{env.INTERNODE_TRANSPORT.name}={value}"
    if value not in INTERNODE_TRANSPORTS:
        return error(f"{text} is not in this version", f"Use one of {', '.join(INTERNODE_TRANSPORTS)}.")
    if value == "nvshmem" and not m.installation.has_nvshmem:
        cuda = (m.torch.cuda_build or "13").partition(".")[0]
        return error(f"{text}, and no package nvidia-nvshmem", f"pip install nvidia-nvshmem-cu{cuda}.")
    return None


def _tuning_variable(m: Machine, value: str) -> Finding | None:
    if value == NO_TABLES or Path(value).is_dir():
        return None
    return error(f"{env.TUNING_DIR.name}={value} is no folder", "Make it, or unset the variable.")


def _level_variable(m: Machine, value: str) -> Finding | None:
    if value.upper() in LEVELS:
        return None
    return error(f"{env.LOG_LEVEL.name}={value} is no level", f"One of {', '.join(LEVELS)}.")


def _devices_variable(m: Machine, value: str) -> Finding | None:
    devices, hca = sorted({port.device for port in m.rdma}), m.environment.get("NCCL_IB_HCA")
    named = [] if value.startswith("^") else value.strip().split(",")
    if absent := ", ".join(each for each in named if each and each.strip() not in devices):
        return error(f"no device {absent} on this host; there are: {', '.join(devices) or 'none'}", "Correct it.")
    return warning(f"does not count: NCCL_IB_HCA={hca} is set", "Unset one of the two.") if hca else None


def _timeout_variable(m: Machine, value: str) -> Finding | None:
    vllm_secs = math.nan if m.vllm.version is None else _vllm_step_secs(m)
    # NaN: not known, and no comparison with it holds.
    if not float(value) >= vllm_secs:
        return None
    found = f"{float(value):g} s: vLLM gives a step up after {vllm_secs:g} s, and cannot say which rank was missing"
    return warning(found, f"Lower it below {vllm_secs:g}.")


VALUE_CHECKS: dict[str, Callable[[Machine, str], Finding | None]] = {
    env.BACKEND.name: _backend_variable,
    env.CONFIG.name: _config_variable,
    env.TIMEOUT_SECS.name: _timeout_variable,
    env.TUNING_DIR.name: _tuning_variable,
    env.INTERNODE_TRANSPORT.name: _transport_variable,
    env.RDMA_DEVICES.name: _devices_variable,
    env.LOG_LEVEL.name: _level_variable,
}
"""Checks of the values, by name."""


def slow_switches(m: Machine) -> Iterator[Finding]:
    """Name variables of other software that make steps slow."""
    for name, effect in SLOW_SWITCHES.items():
        if m.has_gpus and m.environment.get(name) == "1":
            yield warning(f"{name}=1: {effect}", "Unset it, unless it is meant.", subject=name)


def vllm_step(m: Machine) -> Finding | None:
    """Check that vLLM can read its own bound of a step."""
    if not math.isnan(_vllm_step_secs(m)):
        return None
    found = f"{VLLM_STEP}={m.environment[VLLM_STEP]} is no whole number: vLLM cannot read it and exits"
    return (warning if m.vllm.version is None else error)(found, "Correct or unset it.")


def _vllm_step_secs(m: Machine) -> float:
    """Returns vLLM's own bound of a step; NaN where vLLM cannot read the variable."""
    try:
        return int(m.environment.get(VLLM_STEP, VLLM_STEP_SECS))
    except ValueError:
        return math.nan


def other_variables(m: Machine) -> Finding | None:
    """List the variables of other software that are set."""
    others = {n: v for n, v in m.environment.items() if not n.startswith(env.PREFIX) and n not in SLOW_SWITCHES}
    return note(_listed(others)) if others else None


def _listed(variables: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


# --- what a group gets ---


def library(m: Machine) -> Finding | None:
    """Check the library of the requested backend."""
    it = m.backend
    if it.declaration_problem and not m.torch.works:
        return note(f"not probed: {it.name} needs torch, which cannot be imported")
    if it.declaration_problem:
        return error(f"{it.name}: {it.declaration_problem}", USE_ANOTHER)
    if it.problem:
        return error(f"{it.name}: {it.problem}", f"To install it: {it.install}.")
    return ok(f"{it.library} {it.version or 'of unknown version'}") if stands_on_library(it.name) else None


def backend(m: Machine) -> Finding:
    """Report the backend and who chose it."""
    if m.choice.problem:
        return error(m.choice.problem, m.choice.remedy)
    return ok(f"{m.choice.backend}: {m.choice.backend_reason}")


def kernel(m: Machine) -> Finding:
    """Report what moves tokens, and why."""
    num_nodes, place = len(m.choice.ranks_per_node), "GPUs" if m.torch.num_gpus else "CPU processes"
    where = f"{sum(m.choice.ranks_per_node)} ranks on {num_nodes} node{'s' if num_nodes > 1 else ''}"
    return ok(f"{m.choice.kernel}: {m.choice.kernel_reason}, {where}, on {place}")


def hidden_size(m: Machine) -> Iterator[Finding]:
    """Check that rows can be moved and cast."""
    hidden, quant = m.request.hidden_dim or 0, m.request.quant
    row_bytes = hidden * (2 if quant == "none" else 1)
    if row_bytes % ROW_ALIGNMENT_BYTES:
        found = f"{hidden}: rows of {row_bytes} bytes, not a multiple of {ROW_ALIGNMENT_BYTES}"
        yield error(found, "Pad the hidden size.")
    if quant == "fp8_per_1x128" and hidden % GROUP_ELEMENTS:
        yield error(f"{hidden} is no multiple of {GROUP_ELEMENTS}", "Use fp8_per_token.")


def fp8(m: Machine) -> Finding | None:
    """Check that the GPUs can cast."""
    old = [gpu.name for gpu in m.driver.gpus if gpu.capability and gpu.capability < FP8_CAPABILITY]
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


def needed_reach(m: Machine) -> Iterator[Finding]:
    """Check that GPUs reach each other's memory, as ep_a2a's own kernels need."""
    for way, pairs in m.unreached.items():
        if pairs and m.torch.num_gpus:
            found = f"missing between GPUs {pairs}; ep_a2a's kernels need it (NVLink)"
            yield error(found, USE_PORTABLE, subject=way)


def library_gpus(m: Machine) -> Finding | None:
    """Check that a library's kernels run on these GPUs."""
    found, can = "AMD" if m.torch.hip_build else "NVIDIA", m.backend.capabilities
    if not m.torch.num_gpus:
        found = "none"
    if can is None or found in can.gpus or (found == "none" and can.runs_on_cpu):
        return None
    return error(f"{found} here; {m.backend.name} needs {' or '.join(can.gpus)} GPUs", USE_ANOTHER)


def library_sizes(m: Machine) -> Iterator[Finding]:
    """Check that a library's kernels take these sizes; 0 and () in capabilities mean any."""
    can, hidden, tokens, quant = m.backend.capabilities, m.request.hidden_dim, m.request.max_tokens, m.request.quant
    if can is None:
        return
    ranks, num_ranks = m.choice.ranks_per_node, sum(m.choice.ranks_per_node)
    multiple = can.hidden_multiple or 1
    limits: tuple[tuple[Any, str, str], ...] = (
        (can.single_node and len(ranks) > 1, f"{len(ranks)} nodes", "one"),
        (_is_out_of(can.rank_counts, num_ranks), f"{num_ranks} ranks", f"{_texts(can.rank_counts)} ranks"),
        (num_ranks < can.min_ranks, f"{num_ranks} rank", f"{can.min_ranks} or more"),
        (can.max_ranks and num_ranks > can.max_ranks, f"{num_ranks} ranks", f"at most {can.max_ranks}"),
        (_is_out_of(can.hidden_sizes, hidden), f"hidden size {hidden}", f"hidden sizes {_texts(can.hidden_sizes)}"),
        (hidden and hidden % multiple, f"hidden size {hidden}", f"multiples of {multiple}"),
        (can.max_tokens and (tokens or 0) > can.max_tokens, f"{tokens} tokens of a rank", f"at most {can.max_tokens}"),
        (_is_out_of(can.dispatch_casts, quant), f"the cast {quant}", f"the casts {_texts(can.dispatch_casts)}"),
    )
    for is_exceeded, asked, taken in limits:
        if is_exceeded:
            yield error(f"{asked}; {m.backend.name} takes {taken}", USE_ANOTHER)


def _is_out_of(possible: tuple[Any, ...], asked: Any) -> bool:
    return bool(possible) and asked is not None and asked not in possible


def _texts(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))


def library_network(m: Machine) -> Finding | None:
    """Check that a library's kernels get the RDMA that they need."""
    name, can = m.backend.name, m.backend.capabilities
    if can is None or can.rdma == "no" or len(m.choice.ranks_per_node) < 2:
        return None
    if not any(port.state == "ACTIVE" for port in m.rdma):
        remedy = f"Mend the links of the RDMA devices, or use {PORTABLE}."
        return error(f"{name} needs RDMA between nodes; no port here is active", remedy)
    if m.torch.cuda_build and not m.host.gpu_direct:
        found = f"{name} needs NICs that reach GPU memory; there is no nvidia_peermem"
        return warning(found, "modprobe nvidia_peermem, unless the library uses DMA-BUF.")
    return ok(f"RDMA between nodes, as {name} needs")


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
    most, num_gpus, needed = max(m.choice.ranks_per_node), m.torch.num_gpus, m.needed_bytes
    if m.choice.backend != DEFAULT_BACKEND:
        return note(f"not known for {m.choice.backend}: `ep-a2a plan` counts what {DEFAULT_BACKEND} takes")
    if len(m.choice.ranks_per_node) > 1:
        return note("not known over torch.distributed: `ep-a2a plan --vllm` counts it for a model")
    if needed is None:
        return note("`ep-a2a plan` gives no answer for these sizes", "Run it: it says why.")
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
