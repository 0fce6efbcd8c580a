"""Judge a machine, and what a request gets on it: each check yields findings, and CHECKS is the table of all.

A check names a failure that users have had. It looks at facts only, so that tests can describe any broken machine.
"""

import enum
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ep_a2a import env
from ep_a2a.commands.doctor.machine import Choice, Machine
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import did_you_mean
from ep_a2a.policy import LEAST_PROGRAMS

GIB = 1 << 30
OLDEST = {"torch": (2, 11), "triton": (3, 6)}
BF16_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
SMALL_SHARED_MEMORY_BYTES, LITTLE_LOCKED_BYTES = GIB, GIB
"""Docker gives 64 MiB of shared memory unless told otherwise; NCCL and vLLM want much more than that."""
SWITCHES = {
    "CUDA_LAUNCH_BLOCKING": "each launch blocks: steps are slow, and two steps on one rank cannot overlap",
    "CUDA_DEVICE_MAX_CONNECTIONS": "one queue for all streams: steps of two ops that overlap may wait for each other",
    "TRITON_INTERPRET": "an engine's own kernels are interpreted, ours are not",
}
"""Effects of variables that are 1: slow steps, or steps that wait for each other."""

INSTALL_WHEEL = 'pip install "$(make -s wheel)" in the checkout of ep_a2a'
"""What installs this package, of which there is no release."""
REINSTALL = "Install them anew in this environment: pip install --force-reinstall torch triton"
OTHER_LIBRARY = f"Unset LD_LIBRARY_PATH and LD_PRELOAD, by which a library of another version loads. Else: {REINSTALL}"
IMPORT_REMEDIES = {
    "undefined symbol": OTHER_LIBRARY,
    "version `": OTHER_LIBRARY,
    "had not answered": "Look at the disk that it lies on, and ask again: the second import is faster.",
    "": REINSTALL,
}
"""By what an import's error says."""
GPU_REMEDIES = {
    "HIP": "rocm-smi must list them; start containers with --device=/dev/kfd --device=/dev/dri.",
    "driver on your system is too old": "Update the driver, or install a torch for its CUDA.",
    "not yet initialized": "On hosts with NVSwitch: start nvidia-fabricmanager, of the driver's own version.",
    "no NVIDIA driver": "Start the container with its GPUs (--gpus all), or mend the driver: nvidia-smi must work.",
    "": "Look at `python -c 'import torch; torch.cuda.init()'`.",
}
"""By what torch says where it sees no GPU."""
DOCUMENTED = "docs/env.md lists them all."
PORTABLE = "allgather_reducescatter"
USE_PORTABLE = f"Use the {PORTABLE} backend (EP_A2A_BACKEND={PORTABLE}), or other GPUs."
USE_ANOTHER = f"Use {PORTABLE}, or another backend: `ep-a2a backends` lists them."


class Level(enum.StrEnum):
    """How much a finding matters, in ascending order.

    OK and NOTE need no action. A WARNING may be slow or fail. An ERROR prevents use until the remedy is applied.
    """

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """A fact about a part of the machine, and what the reader can do now; "" where nothing needs doing."""

    level: Level
    subject: str
    found: str
    remedy: str = ""


ok, note, warning, error = (functools.partial(Finding, level) for level in Level)


def dotted(numbers: tuple[int, ...]) -> str:
    """Return numbers as a version: "9.0" of (9, 0)."""
    return ".".join(map(str, numbers))


# --- software ---


def package(m: Machine) -> Iterator[Finding]:
    """Check the system, that this package is installed, and that no other copy of it is imported."""
    found, remedy = f"{m.system}, Python {m.python}", "Use Linux: ranks share memory by /dev/shm."
    yield ok("system", found) if m.system == "Linux" else error("system", found, remedy)
    if m.installed_version == m.version:
        yield ok("ep_a2a", m.version)
    elif m.installed_version is None:
        remedy = f"Engines find it only where it is installed: {INSTALL_WHEEL}"
        yield note("ep_a2a", f"{m.version}, not installed: imported from a folder", remedy)
    else:
        remedy = "Another copy comes first on the import path, or an editable install is stale: install it anew."
        yield warning("ep_a2a", f"the code is {m.version}, but {m.installed_version} is installed", remedy)


def libraries(m: Machine) -> Iterator[Finding]:
    """Check that torch and Triton import, and their versions."""
    build = f"CUDA {m.cuda_build}" if m.cuda_build else f"ROCm {m.hip_build}" if m.hip_build else "CPU"
    torch, triton = ("torch", m.torch, m.torch_problem), ("triton", m.triton, m.triton_problem)
    for name, version, problem in (torch, triton):
        found = f"{version}, built for {build}" if name == "torch" else f"{version}"
        if version is None:
            yield error(name, "not installed", f"pip install {name}")
        elif problem:
            remedy = next(remedy for sign, remedy in IMPORT_REMEDIES.items() if sign in problem)
            yield error(name, f"import {name} fails: {problem}", remedy)
        elif tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST[name]:
            yield error(name, found, f"Install {name} {dotted(OLDEST[name])} or later.")
        else:
            yield ok(name, found)


def vllm(m: Machine) -> Iterator[Finding]:
    """Check that the plugin supports this vLLM, and that vLLM finds the plugin."""
    allowed = m.environment.get("VLLM_PLUGINS", "ep_a2a")
    if m.vllm is None:
        yield note("vLLM", "not in this environment")
    elif m.vllm_problem:
        remedy = "Install a supported vLLM, or an ep-a2a that knows this one."
        yield error("vLLM", f"{m.vllm}: {m.vllm_problem}", remedy)
    elif not m.vllm_entry_point:
        found = "ep_a2a is not among vLLM's plugins: vLLM does not know its backends"
        yield error("vLLM", found, f"Install this package in vLLM's environment: {INSTALL_WHEEL}")
    elif "ep_a2a" not in allowed.split(","):
        found = f"VLLM_PLUGINS='{allowed}' does not name ep_a2a; vLLM takes a blank for a part of a name"
        yield error("vLLM", found, "Unset it, or add ep_a2a without blanks.")
    else:
        yield ok("vLLM", f"{m.vllm}; the plugin supports this version")


# --- GPUs ---


def gpus(m: Machine) -> Iterator[Finding]:
    """List the GPUs, and check that torch sees them."""
    for number, gpu in enumerate(m.gpus):
        free = "" if gpu.free_bytes is None else f"{gpu.free_bytes / GIB:.1f} GiB free of "
        ranks = f"{gpu.num_sms} multiprocessors, enough for {gpu.num_sms // LEAST_PROGRAMS} ranks"
        memory = f"{free}{gpu.total_bytes / GIB:.1f} GiB"
        found = f"{gpu.name}, compute capability {dotted(gpu.capability)}, {memory}, {ranks}"
        if gpu.capability < BF16_CAPABILITY:
            yield error(f"GPU {number}", f"{found}: too old for bf16", f"Use the {PORTABLE} backend.")
        elif gpu.capability < FP8_CAPABILITY:
            yield note(
                f"GPU {number}", f"{found}: no fp8 casts, which need compute capability {dotted(FP8_CAPABILITY)}"
            )
        else:
            yield ok(f"GPU {number}", found)
    visible, num_hidden = m.environment.get("CUDA_VISIBLE_DEVICES"), m.num_gpus_of_host - m.num_gpus
    if m.num_gpus:
        hidden = f", {num_hidden} of the host hidden (CUDA_VISIBLE_DEVICES={visible})" if num_hidden > 0 else ""
        yield ok("GPUs", f"{m.num_gpus} visible to torch{hidden}{f'; driver {m.driver}' if m.driver else ''}")
    elif not (m.num_gpus_of_host or m.hip_build):
        yield note("GPUs", f"none ({m.gpu_problem or 'nvidia-smi lists none'}): ranks are CPU processes")
    elif m.lacks == "torch":
        yield note("GPUs", f"{m.num_gpus_of_host} on this host; torch, which describes them, does not work")
    elif not (m.cuda_build or m.hip_build):
        yield error("GPUs", "torch is a build without CUDA", "Install a torch with CUDA: pip install torch")
    else:
        is_hidden = visible is not None and visible.strip() in ("", "-1", "NoDevFiles")
        remedy = next(remedy for sign, remedy in GPU_REMEDIES.items() if sign in m.gpu_problem)
        remedy = f"CUDA_VISIBLE_DEVICES={visible} hides all of them: unset it." if is_hidden else remedy
        yield error("GPUs", f"torch sees none: {m.gpu_problem or 'it gives no reason'}", remedy)


def compiler(m: Machine) -> Iterator[Finding]:
    """Check that Triton can build its launcher, and keep what it has compiled."""
    if m.hip_build or not (m.num_gpus or m.num_gpus_of_host):
        return
    if not m.compiler:
        found = "no C compiler; Triton builds its launcher with one"
        yield error("compiler", found, "apt-get install gcc, or set CC to one.")
    if not m.python_header:
        remedy = "Install Python's headers: apt-get install python3-dev"
        yield error("compiler", "Python.h is missing; Triton's launcher includes it", remedy)
    if m.triton_cache_problem:
        remedy = "Set TRITON_CACHE_DIR to a folder of your own."
        yield error("Triton's cache", f"{m.triton_cache} {m.triton_cache_problem}", remedy)


# --- memory, links and variables ---


def shared_memory(m: Machine) -> Iterator[Finding]:
    """Check /dev/shm."""
    space = f"{m.shared_memory_free_bytes >> 20} of {m.shared_memory_bytes >> 20} MiB free"
    if m.shared_memory_problem:
        remedy = "Mount a tmpfs there that all ranks of the host share (--ipc=host)."
        yield error("/dev/shm", m.shared_memory_problem, remedy)
    elif m.shared_memory_free_bytes < SMALL_SHARED_MEMORY_BYTES:
        remedy = "--shm-size=16g or --ipc=host for containers, mount -o remount,size=16g /dev/shm for hosts."
        yield warning("/dev/shm", space, f"Enlarge it: {remedy}")
    else:
        yield ok("/dev/shm", space)


def rdma(m: Machine) -> Iterator[Finding]:
    """Check that RDMA devices may pin memory, and that those which a variable names are here."""
    devices, limit = ", ".join(m.rdma) or "none", m.locked_memory_bytes
    yield ok("RDMA", f"devices: {devices}" if m.rdma else "no devices: between nodes tokens travel over TCP")
    if m.rdma and limit is not None and limit < LITTLE_LOCKED_BYTES:
        found = f"at most {limit >> 10} KiB: too little to register memory for RDMA"
        yield warning("locked memory", found, "ulimit -l unlimited")
    value = m.environment.get(env.RDMA_DEVICES.name, "")
    named = [] if value.startswith("^") else [each.strip() for each in value.split(",") if each]
    if absent := ", ".join(each for each in named if each not in m.rdma):
        yield error(env.RDMA_DEVICES.name, f"no device {absent} on this host; there are: {devices}", "Correct it.")


def host_name(m: Machine) -> Iterator[Finding]:
    """Check whether other hosts reach this one by its name."""
    found = f"{m.host_name} is {', '.join(m.addresses)}" if m.addresses else f"{m.host_name} has no address"
    is_local = all(address.startswith(("127.", "::1")) for address in m.addresses)
    if is_local and not m.environment.get("GLOO_SOCKET_IFNAME"):
        remedy = "For several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that they share."
        yield note("host name", f"{found}: other hosts cannot reach it", remedy)


def variables(m: Machine) -> Iterator[Finding]:
    """List the variables that are set, and check that those of this package exist and can be read."""
    yield ok("variables", ", ".join(f"{name}={value}" for name, value in m.environment.items()) or "none is set")
    for name, problem in m.variable_problems.items():
        yield error(name, problem, f"Correct or unset it; {DOCUMENTED}")
    known = [each.name for each in env.VARIABLES]
    for name in m.environment:
        if name.startswith(env.PREFIX) and name not in known:
            yield warning(name, "no variable of this version: it does nothing", did_you_mean(name, known) or DOCUMENTED)


def waits(m: Machine) -> Iterator[Finding]:
    """Check that kernels give up before vLLM does, and name switches that make steps slow."""
    name = env.TIMEOUT_SECS.name
    # 300 s is vLLM's own bound of a step.
    own, vllm_secs = m.environment.get(name), m.environment.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300")
    is_read = own and name not in m.variable_problems and vllm_secs.isdecimal()
    if m.vllm and is_read and float(own or 0) >= int(vllm_secs):
        found = f"{own} s: vLLM gives a step up after {vllm_secs} s, and cannot say which rank was missing"
        yield warning(name, found, f"Lower it below {vllm_secs}.")
    for switch, effect in SWITCHES.items():
        if m.num_gpus and m.environment.get(switch) == "1":
            yield warning(switch, f"{switch}=1: {effect}", "Unset it, unless it is meant.")


CHECKS = {
    "software": (package, libraries, vllm),
    "GPUs": (gpus, compiler),
    "links and memory": (shared_memory, rdma, host_name),
    "variables": (variables, waits),
}
"""By section of the report."""
GROUP = "what a group gets"


def run_checks(machine: Machine, choice: Choice) -> dict[str, list[Finding]]:
    """Return what all checks find, by section of the report."""
    sections = {name: [found for check in checks for found in check(machine)] for name, checks in CHECKS.items()}
    return sections | {GROUP: list(group(machine, choice))}


# --- what a group gets ---


def group(m: Machine, choice: Choice) -> Iterator[Finding]:
    """Report the backend, who chose it and its kernel; check all that a group gets of it."""
    if not choice.backend:
        yield error("backend", choice.refusal, choice.remedy)
        return
    yield ok("backend", f"{choice.backend}: {choice.backend_reason}")
    # Without torch and Triton no backend can be asked.
    for problem in () if m.lacks else choice.problems:
        yield error("backend", f"{choice.backend}: {problem}", USE_ANOTHER)
    num_nodes, place = len(choice.ranks_per_node), "GPUs" if m.num_gpus else "CPU processes"
    where = f"{sum(choice.ranks_per_node)} ranks on {num_nodes} node{'s' if num_nodes > 1 else ''}, on {place}"
    yield ok("kernel", f"{choice.kernel}: {choice.kernel_reason}; {where}")
    if choice.refusal:
        yield error("ranks", choice.refusal, choice.remedy)
    for way, pairs in m.unreachable.items() if choice.backend == DEFAULT_BACKEND else ():
        if pairs:
            found = f"missing between GPUs {', '.join(pairs)}; ep_a2a's kernels need it (NVLink)"
            yield error(way, found, USE_PORTABLE)
    yield from ranks(m, choice)


def ranks(m: Machine, choice: Choice) -> Iterator[Finding]:
    """Check that the backend runs between these nodes, and that each rank has a GPU or may share one."""
    counts, most, is_own = choice.ranks_per_node, max(choice.ranks_per_node), choice.backend == DEFAULT_BACKEND
    if is_own and len(set(counts)) > 1:
        remedy = f"Start as many ranks on each node, or use {PORTABLE}."
        yield error("nodes", f"unlike numbers of ranks: {', '.join(map(str, counts))}", remedy)
    if is_own and len(counts) > 1 and m.num_gpus:
        found = "between nodes, ep_a2a on GPUs has run on one host's virtual nodes only"
        yield warning("nodes", found, f"Or use {PORTABLE}.")
    if is_own and 0 < m.num_gpus < most:
        yield note("ranks", f"{most} on a node share {m.num_gpus} GPUs: right, and slower than with a GPU each")
    elif 0 < m.num_gpus < most:
        yield error("ranks", f"{most} on a node, {m.num_gpus} GPUs here", "Start one rank per GPU.")
