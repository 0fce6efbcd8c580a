"""The facts that the checks judge: a machine, and what a request gets on it."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as torch describes it; nvidia-smi adds `free_bytes`, None where it does not say."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    total_bytes: int
    free_bytes: int | None = None


@dataclass(frozen=True)
class Machine:
    """A machine, without judgement.

    Attributes named `*_problem` say why something cannot be used; "" where it can. A version is None where the package
    is not installed, "?" where its import fails.
    """

    # this package: the version of its code, and of its installed metadata
    version: str = ""
    installed_version: str | None = None
    vllm_entry_point: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    variable_problems: dict[str, str] = field(default_factory=dict)
    # libraries
    torch: str | None = "?"
    torch_problem: str = ""
    cuda_build: str | None = None
    hip_build: str | None = None
    triton: str | None = "?"
    triton_problem: str = ""
    triton_cache: str = ""
    triton_cache_problem: str = ""
    vllm: str | None = None
    vllm_problem: str = ""
    # GPUs that torch sees; by way ("peer access", "native atomics") the pairs "0 and 1" that lack it
    num_gpus: int = 0
    gpu_problem: str = ""
    gpus: tuple[Gpu, ...] = ()
    unreachable: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # what nvidia-smi says
    driver: str | None = None
    num_gpus_of_host: int = 0
    # the operating system; `rdma`: names of devices
    system: str = "Linux"
    python: str = ""
    compiler: str = ""
    python_header: bool = False
    shared_memory_problem: str = ""
    shared_memory_bytes: int = 0
    shared_memory_free_bytes: int = 0
    locked_memory_bytes: int | None = None
    host_name: str = ""
    addresses: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()

    @property
    def lacks(self) -> str:
        """The first of torch and Triton that is absent or broken; "" where both work."""
        usable = {"torch": self.torch and not self.torch_problem, "triton": self.triton and not self.triton_problem}
        return next((name for name, works in usable.items() if not works), "")


@dataclass(frozen=True)
class Choice:
    """The backend and the kernel that a request gets, with reasons.

    Attributes:
        backend, backend_reason: the name, and who chose it; "" where there is no such backend.
        device, ranks_per_node: as asked, or as the machine is.
        kernel, kernel_reason: what moves tokens, and why.
        problems: why the backend cannot be used here: its library, the GPUs.
        refusal, remedy: why there is no such backend or why it refuses the ranks, and what to do; "" where it does not.
    """

    backend: str = ""
    backend_reason: str = ""
    device: str = "cpu"
    ranks_per_node: tuple[int, ...] = (1,)
    kernel: str = "not known"
    kernel_reason: str = "its manager could not be asked"
    problems: tuple[str, ...] = ()
    refusal: str = ""
    remedy: str = ""
