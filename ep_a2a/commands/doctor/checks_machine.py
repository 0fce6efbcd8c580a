"""Checks of the software, the GPUs, and what lies between them."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.choice import COLLECTIVE_BACKENDS
from ep_a2a.commands.doctor.finding import Finding, Findings, error, note, ok, warning
from ep_a2a.commands.doctor.machine import GIB, Gpu, Machine, dotted, version_numbers
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.tuning.policy import LEAST_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""NEWEST: the newest that this package has run with. Newer versions get a note."""
UNTRIED = "newer than any version that this package has run with"
INSTALL_WHEEL = 'pip install "$(make -s wheel)" in the checkout of ep_a2a'
"""What installs this package, of which there is no release."""
REINSTALL_TORCH = "Install torch anew in this environment: pip install --force-reinstall torch"
OTHER_LIBRARY = (
    "A library of another version is loaded in place of torch's own: unset LD_LIBRARY_PATH and LD_PRELOAD. "
    f"If that does not help: {REINSTALL_TORCH}"
)
TORCH_REMEDIES = {
    "undefined symbol": OTHER_LIBRARY,
    "version `": OTHER_LIBRARY,
    "cannot open shared object": f"A library that this build needs is missing. {REINSTALL_TORCH}",
    "had not answered": "Look at the disk that it lies on, or give it time: --ask-secs.",
    "": REINSTALL_TORCH,
}
"""By what an import's error says."""
NEEDED_PACKAGES = ("numpy", "typer", "rich")
"""Packages that this one imports beside torch and Triton."""

OLDEST_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
RUN_CAPABILITIES = ((9, 0),)
"""Compute capabilities of the GPUs that this package has run on; for others its kernels have only been compiled."""
FABRIC_MANAGER = "On hosts with NVSwitch: start nvidia-fabricmanager, of the driver's own version."
OTHER_DRIVER = "Update the driver, or install a torch for CUDA {cuda}."
NO_GPU_REMEDIES = {
    "802": FABRIC_MANAGER,
    "not yet initialized": FABRIC_MANAGER,
    "too old": OTHER_DRIVER,
    "insufficient": OTHER_DRIVER,
    "": "Look at `python -c 'import torch; torch.cuda.init()'`.",
}
"""By what torch says where it sees no GPU; `cuda` is the driver's."""
OTHER_GPUS = "Use NVIDIA GPUs, or the backend mori or allgather_reducescatter."
OTHER_CACHE = "Set TRITON_CACHE_DIR to a folder of your own."
SHARING_RANKS = (2, 4, 8)
"""Numbers of ranks on one GPU whose shares are said."""
LITTLE_FREE = 0.5
"""A GPU with a smaller share of free memory gets a warning."""

SMALL_SHARED_MEMORY_BYTES = GIB
"""Docker gives 64 MiB unless told otherwise; NCCL and vLLM want much more than that."""
LITTLE_LOCKED_BYTES = GIB
LIBRARIES = ("nvidia-nccl-", "nvidia-nvshmem-")
"""Starts of the names of packages that bring a library; the rest of the name is the CUDA version."""
MOUNT = "Mount a tmpfs there that all ranks of the host share (--ipc=host)."
INTERFACE = "For several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that they share."


def gibibytes(num_bytes: int) -> str:
    """Returns a number of bytes as text, in GiB."""
    return f"{num_bytes / GIB:.1f} GiB"


def remedy_for(problem: str, remedies: dict[str, str]) -> str:
    """Returns the first remedy whose sign is in the text of a problem."""
    return next(remedy for sign, remedy in remedies.items() if sign in problem)


# --- software ---


def python(m: Machine) -> Finding:
    """Check Python's version."""
    version = dotted(m.host.python)
    return ok(version) if m.host.python >= OLDEST_PYTHON else error(version, "Use Python 3.11 or later.")


def system(m: Machine) -> Finding:
    """Check the operating system."""
    name = m.host.system
    return ok(name) if name == "Linux" else error(name, "Use Linux: ranks share memory by /dev/shm.")


def package(m: Machine) -> Finding:
    """Check that this package is installed, and that no other copy of it is imported."""
    code, installed = m.installation.version, m.installation.installed_version
    if installed is None:
        remedy = f"Engines find it only where it is installed: {INSTALL_WHEEL}"
        return note(f"{code}, not installed: imported from a folder", remedy)
    if installed != code:
        remedy = "Another copy comes first on the import path, or an editable install is stale: install it anew."
        return warning(f"the code is {code}, but {installed} is installed", remedy)
    return ok(code)


def torch(m: Machine) -> Finding:
    """Check that torch imports, and its version."""
    version = m.torch.version
    if version is None:
        return error("not installed", "pip install torch")
    if m.torch.problem:
        return error(f"import torch fails: {m.torch.problem}", remedy_for(m.torch.problem, TORCH_REMEDIES))
    built_for = f"CUDA {m.torch.cuda_build}" if m.torch.cuda_build else "CPU"
    found = f"{version}, built for {f'ROCm {m.torch.hip_build}' if m.torch.hip_build else built_for}"
    if version_numbers(version)[:2] < OLDEST_TORCH:
        return error(found, "Install torch 2.11 or later.")
    return ok(found) if version_numbers(version)[:2] <= NEWEST_TORCH else note(f"{found}, {UNTRIED}")


def gloo(m: Machine) -> Finding | None:
    """Check that torch has gloo."""
    if not m.torch.works or m.torch.has_gloo:
        return None
    return error("not in this torch", f"Ranks meet through gloo. {REINSTALL_TORCH}")


def triton(m: Machine) -> Finding:
    """Check that Triton imports, and its version."""
    version = m.triton.version
    if version is None:
        return error("not installed", "pip install triton; the kernels are Triton, on CPU too")
    if m.triton.problem:
        remedy = "Install the version that your torch names: pip install --force-reinstall torch triton"
        return error(f"import triton fails: {m.triton.problem}", remedy)
    if version_numbers(version)[:2] < OLDEST_TRITON:
        return error(version, "Install Triton 3.6 or later, and the torch that goes with it.")
    return ok(version) if version_numbers(version)[:2] <= NEWEST_TRITON else note(f"{version}, {UNTRIED}")


def packages(m: Machine) -> Finding:
    """Check the packages that this one imports."""
    found = m.installation.packages
    missing = " ".join(name for name in NEEDED_PACKAGES if name not in found)
    if missing:
        return error(f"not installed: {missing}", f"pip install {missing}")
    return ok(", ".join(f"{name} {version}" for name, version in sorted(found.items())))


# --- GPUs ---


def gpus(m: Machine) -> Findings:
    """List the GPUs of the host, and check that torch sees them."""
    if m.torch.hip_build:
        return _rocm_gpus(m)
    if not m.has_gpus:
        return note(f"none ({m.driver.problem or 'the driver lists none'}): ranks are CPU processes")
    each = [ok(_summary(gpu), subject=f"GPU {number}") for number, gpu in enumerate(m.driver.gpus)]
    return [*each, _cuda_gpus(m)] if m.torch.works else each


def _summary(gpu: Gpu) -> str:
    capability = gpu.capability and f"compute capability {dotted(gpu.capability)}"
    memory = None if gpu.total_bytes is None else gibibytes(gpu.total_bytes)
    return ", ".join(filter(None, [gpu.name, capability, memory]))


def _rocm_gpus(m: Machine) -> Finding:
    rocm, backend, num_gpus = f"torch is built for ROCm {m.torch.hip_build}", m.backend, m.torch.num_gpus
    if backend.capabilities is not None and "AMD" in backend.capabilities.gpus:
        if num_gpus:
            return ok(f"{num_gpus} visible to torch; {rocm}, which {backend.name} is for")
        remedy = "rocm-smi must list them; start containers with --device=/dev/kfd --device=/dev/dri."
        return error(f"{rocm}, and sees none: {m.torch.gpu_problem or 'it gives no reason'}", remedy)
    if backend.name in COLLECTIVE_BACKENDS:
        return note(f"{rocm}; {backend.name} calls torch.distributed alone, and has not run there")
    return error(f"{rocm}; the kernels of {backend.name or DEFAULT_BACKEND} hold NVIDIA's instructions", OTHER_GPUS)


def _cuda_gpus(m: Machine) -> Finding:
    said, problem, visible = m.torch.gpu_problem, m.driver.problem, m.environment.get("CUDA_VISIBLE_DEVICES")
    num_gpus, num_hidden = m.torch.num_gpus, m.driver.num_gpus_of_host - m.torch.num_gpus
    if m.torch.cuda_build is None:
        return error("torch is a build without CUDA", "Install a torch with CUDA: pip install torch")
    if num_gpus and num_hidden > 0:
        return note(f"{num_gpus} visible, {num_hidden} of the host hidden (CUDA_VISIBLE_DEVICES={visible})")
    if num_gpus:
        return ok(f"{num_gpus} visible to torch")
    remedy = remedy_for(f"{said} {problem}", NO_GPU_REMEDIES).format(cuda=dotted(m.driver.cuda) or "?")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        remedy = f"CUDA_VISIBLE_DEVICES={visible} hides all of them: unset it."
    elif problem and remedy == NO_GPU_REMEDIES[""]:
        remedy = "Start the container with its GPUs (--gpus all), or mend the driver: nvidia-smi must work."
    return error(f"torch sees none: {said or problem or 'it gives no reason'}", remedy)


def driver(m: Machine) -> Finding:
    """Check that the driver can be used, and serves torch's CUDA."""
    cuda, built = m.driver.cuda, m.torch.cuda_build or "0"
    if cuda is None:
        return error(m.driver.problem, "nvidia-smi must work; in a container, start it with --gpus all.")
    found = f"{m.driver.version or 'version unknown'}, up to CUDA {dotted(cuda)}"
    if version_numbers(built)[:1] > cuda[:1]:
        return error(f"{found}; torch is built for CUDA {built}", OTHER_DRIVER.format(cuda=cuda[0]))
    return ok(found)


def capability(m: Machine) -> Iterator[Finding]:
    """Check the compute capabilities of the GPUs."""
    for number in sorted({gpu.capability for gpu in m.driver.gpus if gpu.capability}):
        text = f"compute capability {dotted(number)}"
        if number < OLDEST_CAPABILITY:
            yield error(f"{text} is too old for bf16", "Use the allgather_reducescatter backend.")
        elif number < FP8_CAPABILITY:
            yield note(f"{text}: no fp8 casts, which need {dotted(FP8_CAPABILITY)}")
        elif number not in RUN_CAPABILITIES:
            yield note(f"{text}: kernels were compiled for it, but have not run on it")
        else:
            yield ok(text)
    if len({gpu.capability for gpu in m.driver.gpus}) > 1:
        yield warning("GPUs differ", "Use equal GPUs for the ranks of one group.")


def _numbers(m: Machine, holds: Callable[[Gpu], bool]) -> str:
    """Returns the numbers of some GPUs as text."""
    return ", ".join(str(number) for number, gpu in enumerate(m.driver.gpus) if holds(gpu))


def mig(m: Machine) -> Finding | None:
    """Name the GPUs that are divided into instances."""
    divided = _numbers(m, lambda gpu: gpu.mig)
    if not divided:
        return None
    remedy = "Turn MIG off (nvidia-smi -mig 0), or use the allgather_reducescatter backend."
    return error(f"GPUs {divided} are divided: instances do not reach each other's memory", remedy)


def compute_mode(m: Machine) -> Iterator[Finding]:
    """Name the GPUs that take no process, or one only."""
    if prohibited := _numbers(m, lambda gpu: gpu.compute_mode == "Prohibited"):
        yield error(f"GPUs {prohibited}: Prohibited", "nvidia-smi -c DEFAULT")
    if exclusive := _numbers(m, lambda gpu: gpu.compute_mode.startswith("Exclusive")):
        remedy = "One rank per GPU works, CUDA IPC between ranks may not: nvidia-smi -c DEFAULT"
        yield warning(f"GPUs {exclusive}: one process each", remedy)


def gpu_memory(m: Machine) -> Iterator[Finding]:
    """Name the GPUs of whose memory others hold more than half."""
    for number, gpu in enumerate(m.driver.gpus):
        if gpu.total_bytes and gpu.free_bytes is not None and gpu.free_bytes < LITTLE_FREE * gpu.total_bytes:
            found = f"GPU {number} has {gibibytes(gpu.free_bytes)} of {gibibytes(gpu.total_bytes)} free"
            yield warning(found, "End the processes that hold it (nvidia-smi); `ep-a2a plan` says what an op needs.")


def sharing(m: Machine) -> Iterator[Finding]:
    """Report how many ranks fit on a GPU, once for GPUs of one kind, and how they would get at it."""
    for num_sms in dict.fromkeys(gpu.num_sms for gpu in m.driver.gpus):
        share = "multiprocessors unknown"
        if num_sms is not None:
            shares = [(ranks, num_sms // ranks) for ranks in SHARING_RANKS if num_sms // ranks >= LEAST_PROGRAMS]
            each = "; ".join(f"{ranks} ranks get {number} each" for ranks, number in shares)
            share = f"{num_sms} multiprocessors, for {num_sms // LEAST_PROGRAMS} ranks at most; {each or 'too few'}"
        if not m.sharing.way:
            yield note(f"{share}; MPS unknown")
        elif m.sharing.at_once:
            yield ok(f"{share}; ranks run {m.sharing.way}")
        else:
            remedy = "Install the driver's nvidia-cuda-mps-control, if ranks are to share GPUs."
            yield note(f"{share}; ranks run {m.sharing.way}", remedy)


def compiler(m: Machine) -> Iterator[Finding]:
    """Check that Triton can build its launcher."""
    if not m.host.compiler:
        yield error("no C compiler; Triton builds its launcher with one", "apt-get install gcc, or set CC to one.")
    if not m.host.python_header:
        remedy = "Install Python's headers: apt-get install python3-dev"
        yield error("Python.h is missing; Triton's launcher includes it", remedy)
    if m.host.compiler and m.host.python_header:
        yield ok(f"{m.host.compiler}, Python.h")


def triton_cache(m: Machine) -> Finding:
    """Check the folder where Triton keeps compiled kernels."""
    cache = m.host.triton_cache
    if not cache.writable:
        return error(f"{cache.path} cannot be written to", OTHER_CACHE)
    if cache.unsafe:
        return error(f"code in {cache.path} is not executed: {cache.unsafe}", OTHER_CACHE)
    if cache.no_exec:
        return error(f"{cache.path} is on a disk mounted noexec", OTHER_CACHE)
    if cache.free_bytes < GIB:
        return warning(f"{gibibytes(cache.free_bytes)} free at {cache.path}", OTHER_CACHE)
    return ok(f"kernels are kept in {cache.path}")


def triton_interpret(m: Machine) -> Finding | None:
    """Check whether Triton's interpreter runs an engine's kernels."""
    if m.environment.get("TRITON_INTERPRET", "0") in ("", "0"):
        return None
    return warning("set: an engine's own kernels are interpreted, ours are not", "Unset it.")


def tuned_tables(m: Machine) -> Finding | None:
    """Check whether launch numbers are tuned for these GPUs."""
    gpus = m.driver.gpus
    if gpus[0].capability is None:
        return None
    name = "sm_{}{}_intra_node_ep{}_".format(*gpus[0].capability, len(gpus))
    if any(table.startswith(name) for table in m.installation.tuned_tables):
        return ok(f"{name}*.json")
    return note(f"none for {len(gpus)} such GPUs: launches are worked out", "`ep-a2a tune` makes some.")


# --- links and memory ---


def links(m: Machine) -> Finding | None:
    """Report how pairs of GPUs are connected."""
    table = m.driver.links
    pairs = [table[a][b] for a in range(len(table)) for b in range(a)]
    if not table:
        return None
    return ok(", ".join(f"{pairs.count(kind)} pairs by {kind}" for kind in sorted(set(pairs))))


def reach(m: Machine) -> Iterator[Finding]:
    """Report which GPUs reach each other's memory; `needed_reach` judges it for the backend."""
    if not m.driver.access:
        yield note("not known: the driver library could not be asked")
    for way, pairs in m.unreached.items() if m.driver.access else ():
        if pairs:
            yield note(f"not between GPUs {pairs}", subject=way)
        else:
            yield ok(f"between all {len(m.driver.gpus)} GPUs", subject=way)


def symmetric_memory(m: Machine) -> Finding | None:
    """Check torch's symmetric memory."""
    if not m.torch.works:
        return None
    remedy = "Install a torch of 2.11 or later with CUDA."
    return ok("torch's") if m.torch.has_symmetric_memory else error("not in this torch", remedy)


def cuda_ipc(m: Machine) -> Finding | None:
    """Check that ranks which all call their GPU cuda:0 can share memory."""
    if not m.torch.has_symmetric_memory or "cuda-bindings" in m.installation.packages:
        return None
    found = "without cuda-bindings: ranks that all call their GPU cuda:0 (Ray) cannot share memory"
    return note(found, "pip install cuda-bindings")


def shared_memory(m: Machine) -> Finding:
    """Check /dev/shm."""
    shared = m.host.shared_memory
    if not shared.exists:
        return error("does not exist", MOUNT)
    if not shared.writable:
        return error("cannot be written to", MOUNT)
    if shared.mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        return error(f"mode {shared.mode:o}: other users may remove and replace files", "chmod 1777 /dev/shm")
    space = f"{shared.free_bytes >> 20} of {shared.size_bytes >> 20} MiB free"
    if shared.free_bytes < SMALL_SHARED_MEMORY_BYTES:
        remedy = "--shm-size=16g or --ipc=host for containers, mount -o remount,size=16g /dev/shm for hosts."
        return warning(space, f"Enlarge it: {remedy}")
    return ok(space)


def locked_memory(m: Machine) -> Finding:
    """Check the limit of memory that may be pinned."""
    limit = m.host.locked_memory_bytes
    if limit is None:
        return ok("no limit")
    if m.rdma and limit < LITTLE_LOCKED_BYTES:
        return warning(f"at most {limit >> 10} KiB: too little to register memory for RDMA", "ulimit -l unlimited")
    return note(f"at most {limit >> 10} KiB; enough without RDMA")


def nccl(m: Machine) -> Finding | None:
    """Check that the NCCL which is loaded is the one that torch was built with."""
    loaded, built = m.torch.nccl, m.torch.nccl_built
    if m.torch.cuda_build is None or m.torch.problem:
        return None
    if loaded is None:
        return error("not in this torch", "Install a torch with CUDA and distributed support.")
    if built and version_numbers(loaded) < version_numbers(built):
        remedy = "Unset LD_PRELOAD, LD_LIBRARY_PATH and VLLM_NCCL_SO_PATH, or install the version that torch names."
        return error(f"{loaded} is loaded, torch was built with {built}", remedy)
    return note(f"{loaded}; torch was built with {built}") if built and loaded != built else ok(loaded)


def nvshmem(m: Machine) -> Finding:
    """Report whether NVSHMEM is there, for those who ask for it."""
    found = "installed" if m.installation.has_nvshmem else "no package nvidia-nvshmem"
    return note(f"{found}; used with {env.INTERNODE_TRANSPORT.name}=nvshmem only")


def libraries(m: Machine) -> Iterator[Finding]:
    """Name libraries that two packages bring for different CUDA versions: the one found first is loaded."""
    for start in LIBRARIES:
        twice = [f"{name} {version}" for name, version in sorted(m.installation.packages.items()) if start in name]
        if len(twice) > 1:
            yield warning(f"both {' and '.join(twice)}", "Uninstall the one that is not for torch's CUDA.")


def rdma(m: Machine) -> Iterator[Finding]:
    """Check the ports of RDMA devices."""
    if not m.rdma:
        yield note("no devices: between nodes tokens travel over TCP")
    for port in m.rdma:
        name = f"{port.device} port {port.port}"
        if port.state != "ACTIVE":
            remedy = f"Mend the link, or leave it out: {env.RDMA_DEVICES.name}=^{port.device}"
            yield warning(f"{name} is {port.state}", remedy)
        elif port.link_layer == "Ethernet" and not port.has_address:
            remedy = "Give its network interface an address; in containers, use the host's network."
            yield warning(f"{name} has no address (GID), which RoCE needs", remedy)
        else:
            yield ok(f"{name}: {port.link_layer}, {port.rate}")


def gpu_direct(m: Machine) -> Finding | None:
    """Check whether NICs reach GPU memory."""
    if not m.rdma or m.host.gpu_direct:
        return None
    return note("no nvidia_peermem: NCCL needs DMA-BUF, or copies by way of the host", "modprobe nvidia_peermem")


def host_name(m: Machine) -> Finding:
    """Check whether other hosts reach this one by its name."""
    name, addresses, interface = m.host.name, m.host.addresses, m.environment.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ok(f"{name}; gloo uses {interface} (GLOO_SOCKET_IFNAME)")
    if not addresses:
        return note(f"{name} has no address", INTERFACE)
    if all(address.startswith(("127.", "::1")) for address in addresses):
        return note(f"{name} is {', '.join(addresses)}, which other hosts cannot reach", INTERFACE)
    return ok(f"{name}: {', '.join(addresses)}")
