"""Checks of the software, the GPUs, and what lies between them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.finding import Finding, error, note, ok, warning
from ep_a2a.commands.doctor.machine import GIB, Gpu, Machine
from ep_a2a.policy import LEAST_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

OLDEST_TORCH, OLDEST_TRITON = (2, 11), (3, 6)
OLDEST_CAPABILITY = (8, 0)
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
    "had not answered": "Look at the disk that it lies on, or give it time: --ask-secs.",
    "": REINSTALL_TORCH,
}
"""By what an import's error says."""
SMALL_SHARED_MEMORY_BYTES = GIB
"""Docker gives 64 MiB unless told otherwise; NCCL and vLLM want much more than that."""
LITTLE_LOCKED_BYTES = GIB
LIBRARIES = ("nvidia-nccl-", "nvidia-nvshmem-")
"""Starts of the names of packages that bring a library; the rest of the name is the CUDA version."""


def version_numbers(version: str | None) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (2, 13, 0) of "2.13.0+cpu", () of None."""
    found = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(map(int, found[0].split("."))) if found else ()


def dotted(numbers: tuple[int, ...]) -> str:
    """Returns numbers as a version: "9.0" of (9, 0)."""
    return ".".join(map(str, numbers))


# --- software ---


def system(m: Machine) -> Finding:
    """Check the operating system."""
    found = f"{m.host.system}, Python {m.host.python}"
    return ok(found) if m.host.system == "Linux" else error(found, "Use Linux: ranks share memory by /dev/shm.")


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
    version, problem = m.torch.version, m.torch.problem
    if version is None:
        return error("not installed", "pip install torch")
    if problem:
        remedy = next(remedy for sign, remedy in TORCH_REMEDIES.items() if sign in problem)
        return error(f"import torch fails: {problem}", remedy)
    builds = {"ROCm": m.torch.hip_build, "CUDA": m.torch.cuda_build}
    found = f"{version}, built for {next((f'{name} {build}' for name, build in builds.items() if build), 'CPU')}"
    if version_numbers(version)[:2] < OLDEST_TORCH:
        return error(found, f"Install torch {dotted(OLDEST_TORCH)} or later.")
    return ok(found)


def triton(m: Machine) -> Finding:
    """Check that Triton imports, and its version."""
    version = m.triton.version
    if version is None:
        return error("not installed", "pip install triton; the kernels are Triton, on CPU too")
    if m.triton.problem:
        remedy = "Install the version that your torch names: pip install --force-reinstall torch triton"
        return error(f"import triton fails: {m.triton.problem}", remedy)
    if version_numbers(version)[:2] < OLDEST_TRITON:
        remedy = f"Install Triton {dotted(OLDEST_TRITON)} or later, and the torch that goes with it."
        return error(version, remedy)
    return ok(version)


def packages(m: Machine) -> Finding:
    """Check numpy, which this package and Triton's interpreter import, and list what else is installed."""
    found = m.installation.packages
    if "numpy" not in found:
        return error("not installed: numpy", "pip install numpy")
    return ok(", ".join(f"{name} {version}" for name, version in found.items()))


# --- GPUs ---


def gpus(m: Machine) -> Iterator[Finding]:
    """List the GPUs, and check that they and torch can be used."""
    if not (m.has_gpus or m.torch.hip_build):
        yield note(f"none ({m.driver.problem or 'the driver lists none'}): ranks are CPU processes")
        return
    for number, gpu in enumerate(m.driver.gpus):
        found, subject = _summary(gpu), f"GPU {number}"
        if gpu.capability < OLDEST_CAPABILITY:
            yield error(f"{found}: too old for bf16", "Use the allgather_reducescatter backend.", subject)
        else:
            yield ok(found, subject=subject)
    if m.torch.works:
        yield _gpus_of_torch(m)


def _summary(gpu: Gpu) -> str:
    free = "" if gpu.free_bytes is None else f"{gpu.free_bytes / GIB:.1f} GiB free of "
    ranks = f"{gpu.num_sms} multiprocessors, enough for {gpu.num_sms // LEAST_PROGRAMS} ranks"
    return f"{gpu.name}, compute capability {dotted(gpu.capability)}, {free}{gpu.total_bytes / GIB:.1f} GiB, {ranks}"


def _gpus_of_torch(m: Machine) -> Finding:
    visible, num_gpus = m.environment.get("CUDA_VISIBLE_DEVICES"), m.torch.num_gpus
    num_hidden = m.driver.num_gpus_of_host - num_gpus
    if num_gpus and num_hidden > 0:
        return ok(f"{num_gpus} visible to torch, {num_hidden} of the host hidden (CUDA_VISIBLE_DEVICES={visible})")
    if num_gpus:
        return ok(f"{num_gpus} visible to torch")
    if m.torch.hip_build:
        remedy = "rocm-smi must list them; start containers with --device=/dev/kfd --device=/dev/dri."
    elif m.torch.cuda_build is None:
        return error("torch is a build without CUDA", "Install a torch with CUDA: pip install torch")
    elif visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        remedy = f"CUDA_VISIBLE_DEVICES={visible} hides all of them: unset it."
    elif "not yet initialized" in m.torch.gpu_problem:
        remedy = "On hosts with NVSwitch: start nvidia-fabricmanager, of the driver's own version."
    elif m.driver.problem:
        remedy = "Start the container with its GPUs (--gpus all), or mend the driver: nvidia-smi must work."
    else:
        remedy = "Look at `python -c 'import torch; torch.cuda.init()'`."
    return error(f"torch sees none: {m.torch.gpu_problem or m.driver.problem or 'it gives no reason'}", remedy)


def driver(m: Machine) -> Finding | None:
    """Check that the driver serves torch's CUDA."""
    cuda, built = m.driver.cuda, m.torch.cuda_build
    if cuda is None:
        return None
    found = f"{m.driver.version or 'version unknown'}, up to CUDA {dotted(cuda)}"
    if version_numbers(built)[:1] > cuda[:1]:
        remedy = f"Update the driver, or install a torch for CUDA {cuda[0]}."
        return error(f"{found}; torch is built for CUDA {built}", remedy)
    return ok(found)


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
    if cache.problem:
        return error(f"{cache.path} {cache.problem}", "Set TRITON_CACHE_DIR to a folder of your own.")
    return ok(f"kernels are kept in {cache.path}")


# --- links and memory ---


def shared_memory(m: Machine) -> Finding:
    """Check /dev/shm."""
    shared = m.host.shared_memory
    if shared.problem:
        return error(shared.problem, "Mount a tmpfs there that all ranks of the host share (--ipc=host).")
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
    return ok(f"at most {limit >> 10} KiB")


def libraries(m: Machine) -> Iterator[Finding]:
    """Name libraries that two packages bring for different CUDA versions: the one found first is loaded."""
    for start in LIBRARIES:
        twice = [f"{name} {version}" for name, version in m.installation.packages.items() if name.startswith(start)]
        if len(twice) > 1:
            yield warning(f"both {' and '.join(twice)}", "Uninstall the one that is not for torch's CUDA.")


def rdma(m: Machine) -> Iterator[Finding]:
    """Check the ports of RDMA devices."""
    if not m.rdma:
        yield ok("no devices: between nodes tokens travel over TCP")
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


def host_name(m: Machine) -> Finding:
    """Check whether other hosts reach this one by its name."""
    name, addresses = m.host.name, m.host.addresses
    interface = m.environment.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ok(f"{name}; gloo uses {interface} (GLOO_SOCKET_IFNAME)")
    if all(address.startswith(("127.", "::1")) for address in addresses):
        found = f"{name} is {', '.join(addresses)}" if addresses else f"{name} has no address"
        remedy = "For several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that they share."
        return note(f"{found}: other hosts cannot reach it", remedy)
    return ok(f"{name}: {', '.join(addresses)}")
