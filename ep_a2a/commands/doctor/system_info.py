"""A machine as the checks see it: facts without judgement. The defaults describe a machine that has nothing."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_a2a.managers.capabilities import Capabilities

NEEDED_PACKAGES = ("numpy", "typer", "rich")
"""Packages that this one imports beside torch and Triton."""
GIB = 1 << 30
AMD, NVIDIA = "AMD", "NVIDIA"
"""Makers of GPUs, as the capabilities of backends name them."""


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def dotted(numbers: tuple[int, ...] | None) -> str:
    """Numbers as a version: "9.0" of (9, 0), "" of None."""
    return ".".join(map(str, numbers or ()))


def gibibytes(num_bytes: int) -> str:
    """A number of bytes as text, in GiB."""
    return f"{num_bytes / GIB:.1f} GiB"


@dataclass(frozen=True)
class Imported:
    """A package that a subprocess imports.

    Attributes:
        version: None where it is not installed.
        problem: why its import fails; "" where it does not.
    """

    version: str | None = None
    problem: str = ""

    @property
    def works(self) -> bool:
        """Whether it is installed and imports."""
        return self.version is not None and not self.problem


@dataclass(frozen=True)
class Torch(Imported):
    """Facts that a subprocess reads from torch.

    Attributes:
        cuda_build: CUDA version that it was built for; None for a CPU or ROCm build.
        hip_build: ROCm version that it was built for, or None.
        num_gpus: GPUs that it sees. gpu_problem: why a build for GPUs sees none.
        architectures: GPU architectures that it has code for, "sm_90" and the like.
        nccl: version of the NCCL that it uses, None without one.
        nccl_built: version of the NCCL that it was built with, None where that is not known.
        has_gloo, has_symmetric_memory, has_nvshmem: parts that are optional in a build.
    """

    cuda_build: str | None = None
    hip_build: str | None = None
    num_gpus: int = 0
    gpu_problem: str = ""
    architectures: tuple[str, ...] = ()
    nccl: str | None = None
    nccl_built: str | None = None
    has_gloo: bool = False
    has_symmetric_memory: bool = False
    has_nvshmem: bool = False

    @property
    def build(self) -> str:
        """Its version, and what it is built for."""
        target = f"CUDA {self.cuda_build}" if self.cuda_build else f"ROCm {self.hip_build}" if self.hip_build else "CPU"
        return f"{self.version}, built for {target}"


@dataclass(frozen=True)
class Triton(Imported):
    """Facts that a subprocess reads from Triton.

    Attributes:
        cache_directory: where it keeps what it has compiled.
    """

    cache_directory: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the CUDA driver and nvidia-smi describe it; None where neither does.

    Attributes:
        name: its model. capability: compute capability. num_sms: multiprocessors.
        total_bytes, free_bytes: its memory.
        mig: whether it is divided into instances. compute_mode: "Default", "Exclusive_Process" or "Prohibited".
    """

    name: str
    capability: tuple[int, int] | None = None
    num_sms: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    mig: bool = False
    compute_mode: str = "Default"

    @property
    def summary(self) -> str:
        """Its model, capability and memory, as far as they are known."""
        capability = self.capability and f"compute capability {dotted(self.capability)}"
        memory = None if self.total_bytes is None else gibibytes(self.total_bytes)
        return ", ".join(filter(None, [self.name, capability, memory]))


@dataclass(frozen=True)
class Driver:
    """Facts from the CUDA driver library and nvidia-smi.

    Attributes:
        problem: why the driver cannot be used; "" where it can.
        version: of the kernel driver. cuda: the newest CUDA version that it serves, None where it is not known.
        gpus: those that this process may use (CUDA_VISIBLE_DEVICES), in its order.
        access, atomics: `[a][b]`: whether GPU a reaches the memory of b; whether with native atomics.
        num_gpus_of_host: GPUs that nvidia-smi lists, visible to this process or not.
        links: `[a][b]`: how GPUs of the host are connected, in the words of `nvidia-smi topo -m`: NV18, PIX, SYS, ...
    """

    problem: str = ""
    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    access: tuple[tuple[bool, ...], ...] = ()
    atomics: tuple[tuple[bool, ...], ...] = ()
    num_gpus_of_host: int = 0
    links: tuple[tuple[str, ...], ...] = ()

    @property
    def versions(self) -> str:
        """Its version and the CUDA version that it serves."""
        return f"{self.version or 'version unknown'}, up to CUDA {dotted(self.cuda)}"

    def unreached(self) -> dict[str, list[tuple[int, int]]]:
        """By way of access, pairs of GPUs of which one does not reach the other."""
        return {
            way: [(a, b) for b in range(len(matrix)) for a in range(b) if not (matrix[a][b] and matrix[b][a])]
            for way, matrix in (("peer access", self.access), ("native atomics", self.atomics))
        }


@dataclass(frozen=True)
class Sharing:
    """How ranks that share a GPU get at it.

    Attributes:
        way: in words; "" where it is not known. at_once: whether kernels of several ranks run at the same time.
    """

    way: str = ""
    at_once: bool = False


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        device, port: its names, "mlx5_0" and "1".
        state: "ACTIVE", "DOWN", ... link_layer: "InfiniBand" or "Ethernet". rate: as the kernel words it.
        has_address: whether any entry of its address table (GID) is set; RoCE needs one.
    """

    device: str
    port: str
    state: str = "ACTIVE"
    link_layer: str = "InfiniBand"
    rate: str = ""
    has_address: bool = True


@dataclass(frozen=True)
class Folder:
    """A folder on this host.

    Attributes:
        path: where it is.
        exists: whether it does. writable: whether this user can make files there.
        owner, mode: user id and permission bits, of the nearest folder above it where it does not exist.
        size_bytes, free_bytes: of the file system that it is on.
        no_exec: whether that file system refuses to run code.
        unsafe: why code that lies there cannot be trusted; "" where it can.
    """

    path: str
    exists: bool = True
    writable: bool = True
    owner: int | None = 0
    mode: int = 0o700
    size_bytes: int = 0
    free_bytes: int = 0
    no_exec: bool = False
    unsafe: str = ""

    @property
    def usable(self) -> bool:
        """Whether this user can make files in it."""
        return self.exists and self.writable

    @property
    def others_may_replace(self) -> bool:
        """Whether other users may remove and replace its files: writable by all, and not sticky."""
        return self.mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH


@dataclass(frozen=True)
class Host:
    """The operating system.

    Attributes:
        python: version. system: "Linux" and so on.
        locked_memory_bytes: limit of memory that may be pinned; None for none.
        shared_memory: /dev/shm. triton_cache: where compiled kernels are kept.
        compiler: a C compiler's path, "" without one. python_header: whether Python.h is there.
        name: of the host. addresses: that its name stands for.
        gpu_direct: kernel module by which NICs reach GPU memory, "" without one.
    """

    python: tuple[int, int, int] = (3, 11, 0)
    system: str = "Linux"
    locked_memory_bytes: int | None = None
    shared_memory: Folder = Folder("/dev/shm", exists=False)
    triton_cache: Folder = Folder("", exists=False)
    compiler: str = ""
    python_header: bool = False
    name: str = ""
    addresses: tuple[str, ...] = ()
    gpu_direct: str = ""


@dataclass(frozen=True)
class Installation:
    """How this package is installed.

    Attributes:
        version: of the code. installed_version: of the package's metadata, None where it is not installed.
        vllm_entry_point: whether vLLM's list of plugins has ours. atom_entry_point: the one for ATOM as its plugin.
        packages: versions of other installed packages by name, only of those that are installed.
        tuned_tables: names of the files of tuned launch numbers that came with it.
    """

    version: str = ""
    installed_version: str | None = None
    vllm_entry_point: bool = False
    atom_entry_point: bool = False
    packages: dict[str, str] = field(default_factory=dict)
    tuned_tables: tuple[str, ...] = ()

    @property
    def missing_packages(self) -> str:
        """Names of packages that this one imports and that are not installed."""
        return " ".join(name for name in NEEDED_PACKAGES if name not in self.packages)

    @property
    def packages_text(self) -> str:
        """The packages as text."""
        return ", ".join(f"{name} {self.packages[name]}" for name in sorted(self.packages))

    @property
    def has_nvshmem(self) -> bool:
        """Whether a package brings NVSHMEM's libraries."""
        return any(name.startswith("nvidia-nvshmem-") for name in self.packages)


@dataclass(frozen=True)
class Vllm:
    """The vLLM of this environment.

    Attributes:
        version: None where there is none.
        version_problem: why the version cannot be used; "" where it can.
        differences: symbols that the plugin needs and that this version changes.
    """

    version: str | None = None
    version_problem: str = ""
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Atom:
    """The ATOM of this environment.

    Attributes:
        version, aiter: of ATOM and of AITER, from which it takes its managers; None where they are not installed,
            "?" where no package metadata says it.
    """

    version: str | None = None
    aiter: str | None = None

    @property
    def versions(self) -> str:
        """Versions of the two, of those that are installed."""
        found = (("ATOM", self.version), ("AITER", self.aiter))
        return ", ".join(f"{name} {version}" for name, version in found if version)


@dataclass(frozen=True)
class Backend:
    """The requested backend; all fields but `name` describe backends that run another project's kernels.

    Attributes:
        name: "" where the request names none, or one that does not exist.
        declaration_problem: why its manager cannot be asked; "" where the other fields are known.
        library, install: the package it needs, and how to get it.
        version: of the installed package, None where no metadata says it.
        problem: why the library cannot be used; "" where it can.
        kernel, kernel_between_nodes: what moves tokens on one node and on several.
        capabilities: what it can do and needs.
    """

    name: str = ""
    declaration_problem: str = ""
    library: str = ""
    install: str = ""
    version: str | None = None
    problem: str = ""
    kernel: str = ""
    kernel_between_nodes: str = ""
    capabilities: Capabilities | None = None


@dataclass(frozen=True)
class SystemInfo:
    """A machine, as the checks see it.

    Attributes:
        sharing: of a GPU by several ranks.
        backend: the requested one, as this machine has it.
        environment: variables of this package and of the libraries that it uses, by name.
        variable_problems: by name, why a variable of this package cannot be used.
    """

    installation: Installation = field(default_factory=Installation)
    torch: Torch = field(default_factory=Torch)
    triton: Triton = field(default_factory=Triton)
    driver: Driver = field(default_factory=Driver)
    sharing: Sharing = field(default_factory=Sharing)
    host: Host = field(default_factory=Host)
    rdma: tuple[RdmaPort, ...] = ()
    vllm: Vllm = field(default_factory=Vllm)
    atom: Atom = field(default_factory=Atom)
    backend: Backend = field(default_factory=Backend)
    environment: dict[str, str] = field(default_factory=dict)
    variable_problems: dict[str, str] = field(default_factory=dict)

    @property
    def has_gpus(self) -> bool:
        """Whether there are GPUs here that torch could use, whether it can or not."""
        return bool(self.driver.gpus) or self.driver.num_gpus_of_host > 0 or self.torch.num_gpus > 0

    @property
    def has_nvidia_gpus(self) -> bool:
        """Whether there are GPUs, and torch is not built for AMD's."""
        return self.has_gpus and not self.torch.hip_build

    @property
    def num_hidden_gpus(self) -> int:
        """GPUs of the host that torch does not see."""
        return self.driver.num_gpus_of_host - self.torch.num_gpus

    @property
    def why_no_gpus(self) -> str:
        """The reason of torch, else of NVIDIA's driver, why torch sees no GPU."""
        driver_problem = "" if self.torch.hip_build else self.driver.problem
        return self.torch.gpu_problem or driver_problem or "it gives no reason"

    @property
    def visible_gpus(self) -> str | None:
        """CUDA_VISIBLE_DEVICES; None where it is not set."""
        return self.environment.get("CUDA_VISIBLE_DEVICES")
