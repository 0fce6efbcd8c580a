"""Checks of GPUs, of the driver, and of what the compilation of kernels needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.checks_backend import COLLECTIVE_BACKENDS
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Case, Check, always, the_machine
from ep_a2a.commands.doctor.system_info import AMD, GIB, dotted, gibibytes
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ep_a2a.commands.doctor.system_info import Gpu, SystemInfo

OLDEST_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
RUN_CAPABILITIES = ((9, 0),)
"""Compute capabilities of the GPUs that this package has run on; for others its kernels have only been compiled."""
LITTLE_FREE = 0.5
"""A GPU with a smaller share of free memory gets a warning."""
ROCM = "torch is built for ROCm {it.torch.hip_build}"
NO_GPUS = "torch sees none: {it.why_no_gpus}"
OTHER_GPUS = "Use NVIDIA GPUs, or the backend mori or allgather_reducescatter."
OTHER_CACHE = "Set TRITON_CACHE_DIR to a folder of your own."


def nvidia(info: SystemInfo) -> Iterable[SystemInfo]:
    """Items of checks that apply to hosts with NVIDIA GPUs only."""
    return (info,) if info.has_nvidia_gpus else ()


def _is_for_amd(info: SystemInfo) -> bool:
    can = info.backend.capabilities
    return can is not None and AMD in can.gpus


def _used_by_torch(info: SystemInfo) -> Iterable[SystemInfo]:
    return nvidia(info) if info.torch.works else ()


def _listed(holds: Callable[[Gpu], bool]) -> Callable[[SystemInfo], list[str]]:
    """The numbers of the GPUs for which `holds`, as one text; no item where there are none."""

    def items(info: SystemInfo) -> list[str]:
        numbers = [str(number) for number, gpu in enumerate(info.driver.gpus) if holds(gpu)]
        return [", ".join(numbers)] if numbers else []

    return items


def _crowded(info: SystemInfo) -> Iterator[tuple[int, str, str]]:
    """(number, free memory, total memory) of GPUs whose memory others hold."""
    for number, gpu in enumerate(info.driver.gpus):
        if gpu.total_bytes and gpu.free_bytes is not None and gpu.free_bytes < LITTLE_FREE * gpu.total_bytes:
            yield number, gibibytes(gpu.free_bytes), gibibytes(gpu.total_bytes)


def _tables(info: SystemInfo) -> Iterator[tuple[str, int, bool]]:
    """(start of the names of tuned tables for these GPUs, number of GPUs, whether there are such tables)."""
    gpus = info.driver.gpus
    if len(gpus) > 1 and gpus[0].capability is not None:
        name = "sm_{}{}_intra_node_ep{}_".format(*gpus[0].capability, len(gpus))
        yield name, len(gpus), any(table.startswith(name) for table in info.installation.tuned_tables)


COMPILATION = (
    Check("compiler", nvidia,
        Case(ERROR, lambda it: not it.host.compiler, "no C compiler; Triton builds its launcher with one",
             "apt-get install gcc, or set CC to one.")),
    Check("compiler", nvidia,
        Case(ERROR, lambda it: not it.host.python_header, "Python.h is missing; Triton's launcher includes it",
             "Install Python's headers: apt-get install python3-dev")),
    Check("Triton's cache", lambda info: [each.host.triton_cache for each in nvidia(info)],
        Case(ERROR, lambda it: not it.writable, "{it.path} cannot be written to", OTHER_CACHE),
        Case(ERROR, lambda it: it.unsafe, "code in {it.path} is not executed: {it.unsafe}", OTHER_CACHE),
        Case(ERROR, lambda it: it.no_exec, "{it.path} is on a disk mounted noexec", OTHER_CACHE),
        Case(WARNING, lambda it: it.free_bytes < GIB, "{it.free_bytes:GiB} free at {it.path}", OTHER_CACHE)),
    Check("TRITON_INTERPRET", nvidia,
        Case(WARNING, lambda it: it.environment.get("TRITON_INTERPRET", "0") not in ("", "0"),
             "set: an engine's own kernels are interpreted, ours are not", "Unset it.")),
)  # fmt: skip

GPUS = (
    Check("GPUs", lambda info: (info,) if info.torch.hip_build else (),
        Case(OK, lambda it: _is_for_amd(it) and it.torch.num_gpus,
             f"{{it.torch.num_gpus}} visible to torch; {ROCM}, which {{it.backend.name}} is for"),
        Case(ERROR, _is_for_amd, f"{ROCM}, and sees none: {{it.why_no_gpus}}",
             "rocm-smi must list them; start containers with --device=/dev/kfd --device=/dev/dri."),
        Case(NOTE, lambda it: it.backend.name in COLLECTIVE_BACKENDS,
             f"{ROCM}; {{it.backend.name}} calls torch.distributed alone, and has not run there"),
        Case(ERROR, lambda it: it.backend.name,
             f"{ROCM}; the kernels of {{it.backend.name}} hold NVIDIA's instructions", OTHER_GPUS),
        Case(ERROR, always, f"{ROCM}; the kernels of {DEFAULT_BACKEND} hold NVIDIA's instructions", OTHER_GPUS)),
    Check("GPUs", lambda info: () if info.has_gpus or info.torch.hip_build else (info,),
        Case(NOTE, lambda it: it.driver.problem, "none ({it.driver.problem}): ranks are CPU processes"),
        Case(NOTE, always, "none (the driver lists none): ranks are CPU processes")),
    Check("GPU {it[0]}", lambda info: enumerate(info.driver.gpus if info.has_nvidia_gpus else ()),
        Case(OK, always, "{it[1].summary}")),
    Check("GPUs", _used_by_torch,
        Case(ERROR, lambda it: it.torch.cuda_build is None, "torch is a build without CUDA",
             "Install a torch with CUDA: pip install torch"),
        Case(NOTE, lambda it: it.torch.num_gpus and it.num_hidden_gpus > 0,
             "{it.torch.num_gpus} visible, {it.num_hidden_gpus} of the host hidden "
             "(CUDA_VISIBLE_DEVICES={it.visible_gpus})"),
        Case(OK, lambda it: it.torch.num_gpus, "{it.torch.num_gpus} visible to torch"),
        Case(ERROR, lambda it: it.visible_gpus is not None and it.visible_gpus.strip() in ("", "-1", "NoDevFiles"),
             NO_GPUS, "CUDA_VISIBLE_DEVICES={it.visible_gpus} hides all of them: unset it."),
        Case(ERROR, lambda it: "802" in it.torch.gpu_problem + it.driver.problem
             or "not yet initialized" in it.torch.gpu_problem,
             NO_GPUS, "On hosts with NVSwitch: start nvidia-fabricmanager, of the driver's own version."),
        Case(ERROR, lambda it: "too old" in it.torch.gpu_problem or "insufficient" in it.torch.gpu_problem,
             NO_GPUS, "Update the driver, or install a torch for CUDA {it.driver.cuda:dotted}."),
        Case(ERROR, lambda it: it.driver.problem,
             NO_GPUS, "Start the container with its GPUs (--gpus all), or mend the driver: nvidia-smi must work."),
        Case(ERROR, always, NO_GPUS, "Look at `python -c 'import torch; torch.cuda.init()'`.")),
    Check("driver", nvidia,
        Case(ERROR, lambda it: it.driver.cuda is None, "{it.driver.problem}",
             "nvidia-smi must work; in a container, start it with --gpus all."),
        Case(ERROR, lambda it: int((it.torch.cuda_build or "0").split(".")[0]) > it.driver.cuda[0],
             "{it.driver.versions}; torch is built for CUDA {it.torch.cuda_build}",
             "Update the driver, or install a torch for CUDA {it.driver.cuda[0]}."),
        Case(OK, always, "{it.driver.versions}")),
    Check("capability", lambda info: sorted({gpu.capability for gpu in info.driver.gpus if gpu.capability}),
        Case(ERROR, lambda it: it < OLDEST_CAPABILITY, "compute capability {it[0]}.{it[1]} is too old for bf16",
             "Use the allgather_reducescatter backend."),
        Case(NOTE, lambda it: it < FP8_CAPABILITY,
             f"compute capability {{it[0]}}.{{it[1]}}: no fp8 casts, which need {dotted(FP8_CAPABILITY)}"),
        Case(NOTE, lambda it: it not in RUN_CAPABILITIES,
             "compute capability {it[0]}.{it[1]}: kernels were compiled for it, but have not run on it"),
        Case(OK, always, "compute capability {it[0]}.{it[1]}")),
    Check("capability", the_machine,
        Case(WARNING, lambda it: len({gpu.capability for gpu in it.driver.gpus}) > 1, "GPUs differ",
             "Let ranks of one group have equal GPUs.")),
    Check("MIG", _listed(lambda gpu: gpu.mig),
        Case(ERROR, always, "GPUs {it} are divided: instances do not reach each other's memory",
             "Turn MIG off (nvidia-smi -mig 0), or use the allgather_reducescatter backend.")),
    Check("compute mode", _listed(lambda gpu: gpu.compute_mode == "Prohibited"),
        Case(ERROR, always, "GPUs {it}: Prohibited", "nvidia-smi -c DEFAULT")),
    Check("compute mode", _listed(lambda gpu: gpu.compute_mode.startswith("Exclusive")),
        Case(WARNING, always, "GPUs {it}: one process each",
             "One rank per GPU works, CUDA IPC between ranks may not: nvidia-smi -c DEFAULT")),
    Check("GPU memory", _crowded,
        Case(WARNING, always, "GPU {it[0]} has {it[1]} of {it[2]} free",
             "End what holds it (nvidia-smi); `ep-a2a plan` says what an op needs.")),
    *COMPILATION,
    Check("compiler", nvidia,
        Case(OK, lambda it: not any(check(it) for check in COMPILATION),
             "{it.host.compiler}, Python.h; kernels are kept in {it.host.triton_cache.path}")),
    Check("tuned tables", _tables,
        Case(OK, lambda it: it[2], "{it[0]}*.json"),
        Case(NOTE, always, "none for {it[1]} such GPUs: launches are worked out", "`ep-a2a tune` makes some.")),
)  # fmt: skip
