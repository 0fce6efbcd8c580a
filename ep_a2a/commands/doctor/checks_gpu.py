"""Checks of GPUs, of the driver, and of what kernels need to be compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.checks_backend import AMD, COLLECTIVE_BACKENDS
from ep_a2a.commands.doctor.diagnostic import Finding, error, note, ok, warning
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.system_info import Machine

OLDEST_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
RUN_CAPABILITIES = ((9, 0),)
"""Of the GPUs that this package has been run on; for others its kernels have only been compiled."""
LITTLE_FREE = 0.5
GIB = 1 << 30


def check_gpus(machine: Machine) -> list[Finding]:
    """Whether there are GPUs, and whether torch can use them."""
    torch, driver = machine.torch, machine.driver
    if torch.hip_build:
        return _use_of_rocm(machine)
    if not machine.has_gpus:
        return [note("GPUs", f"none ({driver.problem or 'the driver lists none'}): ranks are CPU processes")]
    listed = [
        ok(f"GPU {index}", ", ".join(filter(None, [gpu.name, _capability(gpu.capability), _memory(gpu.total_bytes)])))
        for index, gpu in enumerate(driver.gpus)
    ]
    return [*listed, *_use_by_torch(machine)]


def _use_of_rocm(machine: Machine) -> list[Finding]:
    """Whether the backend that is asked for is one for AMD's GPUs; ep_a2a's own kernels are not."""
    torch, backend = machine.torch, machine.backend
    built = f"torch is built for ROCm {torch.hip_build}"
    if backend.capabilities is not None and AMD in backend.capabilities.gpus:
        if torch.num_gpus:
            return [ok("GPUs", f"{torch.num_gpus} visible to torch; {built}, which {backend.name} is for")]
        return [
            error("GPUs", f"{built}, and sees none: {torch.gpu_problem or 'it gives no reason'}",
                  "rocm-smi must list them; start containers with --device=/dev/kfd --device=/dev/dri.")
        ]  # fmt: skip
    if backend.name in COLLECTIVE_BACKENDS:
        return [note("GPUs", f"{built}; {backend.name} calls torch.distributed alone, and has not run there")]
    return [
        error("GPUs", f"{built}; the kernels of {backend.name or DEFAULT_BACKEND} hold NVIDIA's instructions",
              "Use NVIDIA GPUs, or the backend mori or allgather_reducescatter.")
    ]  # fmt: skip


def _use_by_torch(machine: Machine) -> list[Finding]:
    torch, driver = machine.torch, machine.driver
    if torch.version is None or torch.problem:
        return []
    if torch.cuda_build is None:
        return [error("GPUs", "torch is a build without CUDA", "Install a torch with CUDA: pip install torch")]
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if torch.num_gpus == 0:
        if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
            remedy = f"CUDA_VISIBLE_DEVICES={visible} hides all of them: unset it."
        elif "802" in torch.gpu_problem + driver.problem or "not yet initialized" in torch.gpu_problem:
            remedy = "On hosts with NVSwitch: start nvidia-fabricmanager, of the driver's own version."
        elif "too old" in torch.gpu_problem or "insufficient" in torch.gpu_problem:
            remedy = f"Update the driver, or install a torch for CUDA {_dotted(driver.cuda) or 'of this driver'}."
        elif driver.problem:
            remedy = "Start the container with its GPUs (--gpus all), or mend the driver: nvidia-smi must work."
        else:
            remedy = "Look at `python -c 'import torch; torch.cuda.init()'`."
        what = torch.gpu_problem or driver.problem or "it gives no reason"
        return [error("GPUs", f"torch sees none: {what}", remedy)]
    hidden = driver.num_gpus_of_host - torch.num_gpus
    if hidden > 0:
        return [note("GPUs", f"{torch.num_gpus} visible, {hidden} of the host hidden (CUDA_VISIBLE_DEVICES={visible})")]
    return [ok("GPUs", f"{torch.num_gpus} visible to torch")]


def check_driver(machine: Machine) -> list[Finding]:
    """The driver and the CUDA version that it serves."""
    driver, build = machine.driver, machine.torch.cuda_build
    if not machine.has_gpus or machine.torch.hip_build:
        return []
    if driver.cuda is None:
        return [error("driver", driver.problem, "nvidia-smi must work; in a container, start it with --gpus all.")]
    text = f"{driver.version or 'version unknown'}, up to CUDA {_dotted(driver.cuda)}"
    if build is not None and int(build.split(".")[0]) > driver.cuda[0]:
        return [error("driver", f"{text}; torch is built for CUDA {build}",
                      f"Update the driver, or install a torch for CUDA {driver.cuda[0]}.")]  # fmt: skip
    return [ok("driver", text)]


def check_capability(machine: Machine) -> list[Finding]:
    """Whether kernels run on these GPUs."""
    findings = []
    for capability in sorted({gpu.capability for gpu in machine.driver.gpus if gpu.capability}):
        text = _capability(capability)
        if capability < OLDEST_CAPABILITY:
            findings.append(
                error("capability", f"{text} is too old for bf16", "Use the allgather_reducescatter backend.")
            )
        elif capability < FP8_CAPABILITY:
            findings.append(note("capability", f"{text}: no fp8 casts, which need 8.9"))
        elif capability not in RUN_CAPABILITIES:
            findings.append(note("capability", f"{text}: kernels were compiled for it, but have not run on it"))
        else:
            findings.append(ok("capability", text))
    if len({gpu.capability for gpu in machine.driver.gpus}) > 1:
        findings.append(warning("capability", "GPUs differ", "Let ranks of one group have equal GPUs."))
    return findings


def check_sharing(machine: Machine) -> list[Finding]:
    """Modes of GPUs that keep ranks from them or from each other."""
    findings = []
    gpus = list(enumerate(machine.driver.gpus))
    if divided := [index for index, gpu in gpus if gpu.mig]:
        findings.append(
            error("MIG", f"GPUs {_listed(divided)} are divided: instances do not reach each other's memory",
                  "Turn MIG off (nvidia-smi -mig 0), or use the allgather_reducescatter backend.")
        )  # fmt: skip
    if closed := [index for index, gpu in gpus if gpu.compute_mode == "Prohibited"]:
        findings.append(error("compute mode", f"GPUs {_listed(closed)}: Prohibited", "nvidia-smi -c DEFAULT"))
    if exclusive := [index for index, gpu in gpus if gpu.compute_mode.startswith("Exclusive")]:
        findings.append(
            warning("compute mode", f"GPUs {_listed(exclusive)}: one process each",
                    "One rank per GPU works, CUDA IPC between ranks may not: nvidia-smi -c DEFAULT")
        )  # fmt: skip
    return findings


def check_free_memory(machine: Machine) -> list[Finding]:
    """Whether other processes hold the GPUs' memory."""
    findings = []
    for index, gpu in enumerate(machine.driver.gpus):
        if gpu.total_bytes and gpu.free_bytes is not None and gpu.free_bytes < LITTLE_FREE * gpu.total_bytes:
            findings.append(
                warning("GPU memory", f"GPU {index} has {_memory(gpu.free_bytes)} of {_memory(gpu.total_bytes)} free",
                        "End what holds it (nvidia-smi); `ep-a2a plan` says what an op needs.")
            )  # fmt: skip
    return findings


def check_compilation(machine: Machine) -> list[Finding]:
    """What Triton needs to build its launcher and to keep kernels; with ROCm none of this package's are compiled."""
    if not machine.has_gpus or machine.torch.hip_build:
        return []
    host, cache = machine.host, machine.host.triton_cache
    findings = []
    if not host.compiler:
        findings.append(
            error("compiler", "no C compiler; Triton builds its launcher with one",
                  "apt-get install gcc, or set CC to one.")
        )  # fmt: skip
    if not host.python_header:
        findings.append(
            error("compiler", "Python.h is missing; Triton's launcher includes it",
                  "Install Python's headers: apt-get install python3-dev")
        )  # fmt: skip
    elsewhere = "Set TRITON_CACHE_DIR to a folder of your own."
    if not cache.writable:
        findings.append(error("Triton's cache", f"{cache.path} cannot be written to", elsewhere))
    elif cache.unsafe:
        findings.append(
            error("Triton's cache", f"code in {cache.path} is not executed: {cache.unsafe}", elsewhere)
        )  # fmt: skip
    elif cache.no_exec:
        findings.append(error("Triton's cache", f"{cache.path} is on a disk mounted noexec", elsewhere))
    elif cache.free_bytes < GIB:
        findings.append(warning("Triton's cache", f"{_memory(cache.free_bytes)} free at {cache.path}", elsewhere))
    if machine.environment.get("TRITON_INTERPRET", "0") not in ("", "0"):
        findings.append(
            warning("TRITON_INTERPRET", "set: an engine's own kernels are interpreted, ours are not", "Unset it.")
        )  # fmt: skip
    return findings or [ok("compiler", f"{host.compiler}, Python.h; kernels are kept in {cache.path}")]


def check_tuning(machine: Machine) -> list[Finding]:
    """Whether there are tuned launch numbers for these GPUs."""
    gpus = machine.driver.gpus
    if not gpus or gpus[0].capability is None or len(gpus) < 2:
        return []
    name = "sm_{}{}_intra_node_ep{}_".format(*gpus[0].capability, len(gpus))
    if any(table.startswith(name) for table in machine.installation.tuned_tables):
        return [ok("tuned tables", f"{name}*.json")]
    return [
        note("tuned tables", f"none for {len(gpus)} such GPUs: launches are worked out", "`ep-a2a tune` makes some.")
    ]


def _capability(capability: tuple[int, int] | None) -> str:
    return "" if capability is None else f"compute capability {_dotted(capability)}"


def _dotted(numbers: tuple[int, ...] | None) -> str:
    return ".".join(map(str, numbers or ()))


def _memory(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.1f} GiB"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
