"""A machine as the checks see it: facts without judgement."""

from __future__ import annotations

from dataclasses import dataclass, field

GIB = 1 << 30


@dataclass(frozen=True)
class Request:
    """A configuration to be judged.

    Attributes:
        backend: named by the caller; None takes the config file, then EP_A2A_BACKEND, then the default.
        config_file: a TOML file; None takes EP_A2A_CONFIG.
        ranks_per_node: ranks of each node; () is one node with a rank per visible GPU, or four on CPU.
        hidden_dim: elements of a token's row; None does not judge it.
        quant: cast inside dispatch: "none", "fp8_per_token", "fp8_per_1x128" or "mxfp8".
        max_tokens: tokens per rank; None does not judge memory.
    """

    backend: str | None = None
    config_file: str | None = None
    ranks_per_node: tuple[int, ...] = ()
    hidden_dim: int | None = None
    quant: str = "none"
    max_tokens: int | None = None


@dataclass(frozen=True)
class Choice:
    """The backend, kernel and device that a request gets.

    Attributes:
        backend, backend_reason: the name, and who chose it. kernel, kernel_reason: what moves tokens, and why.
        device: "cpu" or "cuda". ranks_per_node: as asked, or as the machine is.
        problem, remedy: why there is no such backend, and what to do; "" where there is.
    """

    backend: str = ""
    backend_reason: str = ""
    kernel: str = ""
    kernel_reason: str = ""
    device: str = "cpu"
    ranks_per_node: tuple[int, ...] = (1,)
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Imported:
    """A package that a subprocess imports.

    Attributes:
        version: None where it is not installed, "?" where its import fails.
        problem: why its import fails; "" where it does not.
    """

    version: str | None = "?"
    problem: str = ""

    @property
    def works(self) -> bool:
        """Whether it is installed and imports."""
        return self.version is not None and not self.problem


@dataclass(frozen=True)
class Torch(Imported):
    """Facts that a subprocess reads from torch.

    Attributes:
        cuda_build, hip_build: CUDA or ROCm version that it was built for, or None.
        num_gpus: GPUs that it sees. gpu_problem: why a build for GPUs sees none.
    """

    cuda_build: str | None = None
    hip_build: str | None = None
    num_gpus: int = 0
    gpu_problem: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the CUDA driver describes it.

    Attributes:
        name: its model. capability: compute capability. num_sms: multiprocessors.
        total_bytes, free_bytes: its memory; None where nvidia-smi does not say what is free.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    total_bytes: int
    free_bytes: int | None = None


@dataclass(frozen=True)
class Driver:
    """Facts from the CUDA driver library and nvidia-smi.

    Attributes:
        problem: why the driver cannot be used; "" where it can.
        version: of the kernel driver. cuda: the newest CUDA version that it serves, None where it is not known.
        gpus: those that this process may use (CUDA_VISIBLE_DEVICES), in its order.
        access, atomics: `[a][b]`: whether GPU a reaches the memory of b; whether with native atomics.
        num_gpus_of_host: GPUs that nvidia-smi lists, visible to this process or not.
    """

    problem: str = ""
    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    access: tuple[tuple[bool, ...], ...] = ()
    atomics: tuple[tuple[bool, ...], ...] = ()
    num_gpus_of_host: int = 0


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
        problem: why it cannot be used; "" where it can.
        size_bytes, free_bytes: of the file system that it is on.
    """

    path: str
    problem: str = ""
    size_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True)
class Host:
    """The operating system.

    Attributes:
        python: version. system: "Linux" and so on.
        locked_memory_bytes: limit of memory that may be pinned; None for none.
        shared_memory: /dev/shm. triton_cache: where compiled kernels are kept.
        compiler: a C compiler's path, "" without one. python_header: whether Python.h is there.
        name: of the host. addresses: that its name stands for.
    """

    python: str = ""
    system: str = "Linux"
    locked_memory_bytes: int | None = None
    shared_memory: Folder = Folder("/dev/shm", "does not exist")
    triton_cache: Folder = Folder("")
    compiler: str = ""
    python_header: bool = False
    name: str = ""
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Installation:
    """How this package is installed.

    Attributes:
        version: of the code. installed_version: of the package's metadata, None where it is not installed.
        vllm_entry_point: whether vLLM's list of plugins has ours. atom_entry_point: the one for ATOM as its plugin.
        packages: versions of other installed packages by name, only of those that are installed.
    """

    version: str = ""
    installed_version: str | None = None
    vllm_entry_point: bool = False
    atom_entry_point: bool = False
    packages: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Vllm:
    """The vLLM of this environment.

    Attributes:
        version: None where there is none.
        problem: why the plugin cannot use it; "" where it can.
    """

    version: str | None = None
    problem: str = ""


@dataclass(frozen=True)
class Atom:
    """The ATOM of this environment.

    Attributes:
        version, aiter: of ATOM and of AITER, from which it takes its managers; None where they are not installed,
            "?" where no package metadata says it.
    """

    version: str | None = None
    aiter: str | None = None


@dataclass(frozen=True)
class Backend:
    """The backend that a request gets, as its manager and its library describe themselves.

    Attributes:
        name: "" where there is no such backend.
        kernel, kernel_reason: what moves tokens between the requested ranks, and why.
        problems: why it cannot be used here: its library, the GPUs; () where it can.
        refusal, remedy: why it does not take the requested sizes, and what to do; "" where it does.
        needed_bytes: memory that the request takes on each rank; None where it is not known.
    """

    name: str = ""
    kernel: str = "not known"
    kernel_reason: str = "its manager could not be asked"
    problems: tuple[str, ...] = ()
    refusal: str = ""
    remedy: str = ""
    needed_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """A machine, and what is asked of it.

    Attributes:
        environment: variables of this package and of the libraries that it uses, by name.
        variable_problems: by name, why a variable of this package cannot be used.
        request, choice: the configuration to judge, and the backend, kernel and ranks that it gets.
        backend: the chosen backend, as this machine has it.
    """

    installation: Installation = field(default_factory=Installation)
    torch: Torch = field(default_factory=Torch)
    triton: Imported = field(default_factory=Imported)
    driver: Driver = field(default_factory=Driver)
    host: Host = field(default_factory=Host)
    rdma: tuple[RdmaPort, ...] = ()
    vllm: Vllm = field(default_factory=Vllm)
    atom: Atom = field(default_factory=Atom)
    environment: dict[str, str] = field(default_factory=dict)
    variable_problems: dict[str, str] = field(default_factory=dict)
    request: Request = field(default_factory=Request)
    choice: Choice = field(default_factory=Choice)
    backend: Backend = field(default_factory=Backend)

    @property
    def has_gpus(self) -> bool:
        """Whether there are GPUs here that torch could use, whether it can or not."""
        return max(len(self.driver.gpus), self.driver.num_gpus_of_host, self.torch.num_gpus) > 0
