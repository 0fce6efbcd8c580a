"""Checks of GPUs, of the driver, and of what the compilation of kernels needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.checks_backend import COLLECTIVE_BACKENDS
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Diagnostic, every, first
from ep_a2a.commands.doctor.system_info import AMD, GIB, dotted, gibibytes, version_numbers
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.tuning.policy import LEAST_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ep_a2a.commands.doctor.system_info import Gpu, SystemInfo

OLDEST_CAPABILITY, FP8_CAPABILITY = (8, 0), (8, 9)
RUN_CAPABILITIES = ((9, 0),)
"""Compute capabilities of the GPUs that this package has run on; for others its kernels have only been compiled."""
SHARING_RANKS = (2, 4, 8)
"""Numbers of ranks on one GPU whose shares are said."""
LITTLE_FREE = 0.5
"""A GPU with a smaller share of free memory gets a warning."""
OTHER_GPUS = "Use NVIDIA GPUs, or the backend mori or allgather_reducescatter."
OTHER_CACHE = "Set TRITON_CACHE_DIR to a folder of your own."


def check_gpus(info: SystemInfo) -> Iterator[Diagnostic]:
    """Checks the GPUs that torch sees, the driver, and the compilation of kernels for them."""
    if info.torch.hip_build:
        yield from _rocm_gpus(info)
    elif not info.has_gpus:
        reason = info.driver.problem or "the driver lists none"
        yield Diagnostic("GPUs", NOTE, f"none ({reason}): ranks are CPU processes")
    else:
        for number, gpu in enumerate(info.driver.gpus):
            yield Diagnostic(f"GPU {number}", OK, gpu.summary)
        if info.torch.works:
            yield from _seen_by_torch(info)
        yield from _driver(info)
    yield from _each_gpu(info)
    if info.has_nvidia_gpus:
        yield from _sharing(info)
        problems = [*_compilation(info)]
        kept = f"{info.host.compiler}, Python.h; kernels are kept in {info.host.triton_cache.path}"
        yield from problems or [Diagnostic("compiler", OK, kept)]
    gpus = info.driver.gpus
    if len(gpus) > 1 and gpus[0].capability is not None:
        name = "sm_{}{}_intra_node_ep{}_".format(*gpus[0].capability, len(gpus))
        yield from first(
            "tuned tables",
            (OK, any(table.startswith(name) for table in info.installation.tuned_tables), f"{name}*.json"),
            (NOTE, True, f"none for {len(gpus)} such GPUs: launches are worked out", "`ep-a2a tune` makes some."),
        )


def _sharing(info: SystemInfo) -> Iterator[Diagnostic]:
    """Says, once for GPUs of one kind, how many ranks fit on one, and how they would get at it."""
    way = info.sharing.way and f"ranks run {info.sharing.way}"
    for num_sms in dict.fromkeys(gpu.num_sms for gpu in info.driver.gpus):
        share = "multiprocessors unknown"
        if num_sms is not None:
            shares = {ranks: num_sms // ranks for ranks in SHARING_RANKS if num_sms // ranks >= LEAST_PROGRAMS}
            each = "; ".join(f"{ranks} ranks get {number} each" for ranks, number in shares.items())
            share = f"{num_sms} multiprocessors, for {num_sms // LEAST_PROGRAMS} ranks at most; {each or 'too few'}"
        yield from first(
            "ranks that share a GPU",
            (NOTE, not way, f"{share}; MPS unknown"),
            (
                NOTE,
                not info.sharing.at_once,
                f"{share}; {way}",
                "Install the driver's nvidia-cuda-mps-control, if ranks are to share GPUs.",
            ),
            (OK, True, f"{share}; {way}"),
        )


def _rocm_gpus(info: SystemInfo) -> list[Diagnostic]:
    rocm, backend, num_gpus = f"torch is built for ROCm {info.torch.hip_build}", info.backend, info.torch.num_gpus
    is_for_amd = backend.capabilities is not None and AMD in backend.capabilities.gpus
    return first(
        "GPUs",
        (OK, is_for_amd and num_gpus, f"{num_gpus} visible to torch; {rocm}, which {backend.name} is for"),
        (
            ERROR,
            is_for_amd,
            f"{rocm}, and sees none: {info.why_no_gpus}",
            "rocm-smi must list them; start containers with --device=/dev/kfd --device=/dev/dri.",
        ),
        (
            NOTE,
            backend.name in COLLECTIVE_BACKENDS,
            f"{rocm}; {backend.name} calls torch.distributed alone, and has not run there",
        ),
        (
            ERROR,
            True,
            f"{rocm}; the kernels of {backend.name or DEFAULT_BACKEND} hold NVIDIA's instructions",
            OTHER_GPUS,
        ),
    )


def _seen_by_torch(info: SystemInfo) -> list[Diagnostic]:
    num_gpus, visible = info.torch.num_gpus, info.visible_gpus
    said, none = info.torch.gpu_problem, f"torch sees none: {info.why_no_gpus}"
    return first(
        "GPUs",
        (
            ERROR,
            info.torch.cuda_build is None,
            "torch is a build without CUDA",
            "Install a torch with CUDA: pip install torch",
        ),
        (
            NOTE,
            num_gpus and info.num_hidden_gpus > 0,
            f"{num_gpus} visible, {info.num_hidden_gpus} of the host hidden (CUDA_VISIBLE_DEVICES={visible})",
        ),
        (OK, num_gpus, f"{num_gpus} visible to torch"),
        (
            ERROR,
            visible is not None and visible.strip() in ("", "-1", "NoDevFiles"),
            none,
            f"CUDA_VISIBLE_DEVICES={visible} hides all of them: unset it.",
        ),
        (
            ERROR,
            "802" in said + info.driver.problem or "not yet initialized" in said,
            none,
            "On hosts with NVSwitch: start nvidia-fabricmanager, of the driver's own version.",
        ),
        (
            ERROR,
            "too old" in said or "insufficient" in said,
            none,
            f"Update the driver, or install a torch for CUDA {dotted(info.driver.cuda) or '?'}.",
        ),
        (
            ERROR,
            info.driver.problem,
            none,
            "Start the container with its GPUs (--gpus all), or mend the driver: nvidia-smi must work.",
        ),
        (ERROR, True, none, "Look at `python -c 'import torch; torch.cuda.init()'`."),
    )


def _driver(info: SystemInfo) -> list[Diagnostic]:
    driver, built = info.driver, info.torch.cuda_build or "0"
    cuda = driver.cuda or (0, 0)
    return first(
        "driver",
        (ERROR, driver.cuda is None, driver.problem, "nvidia-smi must work; in a container, start it with --gpus all."),
        (
            ERROR,
            version_numbers(built)[:1] > cuda[:1],
            f"{driver.versions}; torch is built for CUDA {built}",
            f"Update the driver, or install a torch for CUDA {cuda[0]}.",
        ),
        (OK, True, driver.versions),
    )


def _each_gpu(info: SystemInfo) -> Iterator[Diagnostic]:
    gpus = info.driver.gpus
    capabilities = sorted({gpu.capability for gpu in gpus if gpu.capability})
    for capability in capabilities:
        text = f"compute capability {dotted(capability)}"
        yield from first(
            "capability",
            (
                ERROR,
                capability < OLDEST_CAPABILITY,
                f"{text} is too old for bf16",
                "Use the allgather_reducescatter backend.",
            ),
            (NOTE, capability < FP8_CAPABILITY, f"{text}: no fp8 casts, which need {dotted(FP8_CAPABILITY)}"),
            (NOTE, capability not in RUN_CAPABILITIES, f"{text}: kernels were compiled for it, but have not run on it"),
            (OK, True, text),
        )

    def numbers(holds: Callable[[Gpu], bool]) -> str:
        return ", ".join(str(number) for number, gpu in enumerate(gpus) if holds(gpu))

    divided = numbers(lambda gpu: gpu.mig)
    prohibited = numbers(lambda gpu: gpu.compute_mode == "Prohibited")
    exclusive = numbers(lambda gpu: gpu.compute_mode.startswith("Exclusive"))
    yield from first(
        "capability",
        (
            WARNING,
            len({gpu.capability for gpu in gpus}) > 1,
            "GPUs differ",
            "Use equal GPUs for the ranks of one group.",
        ),
    )
    yield from first(
        "MIG",
        (
            ERROR,
            divided,
            f"GPUs {divided} are divided: instances do not reach each other's memory",
            "Turn MIG off (nvidia-smi -mig 0), or use the allgather_reducescatter backend.",
        ),
    )
    yield from every(
        "compute mode",
        (ERROR, prohibited, f"GPUs {prohibited}: Prohibited", "nvidia-smi -c DEFAULT"),
        (
            WARNING,
            exclusive,
            f"GPUs {exclusive}: one process each",
            "One rank per GPU works, CUDA IPC between ranks may not: nvidia-smi -c DEFAULT",
        ),
    )
    for number, gpu in enumerate(gpus):
        if gpu.total_bytes and gpu.free_bytes is not None and gpu.free_bytes < LITTLE_FREE * gpu.total_bytes:
            yield Diagnostic(
                "GPU memory",
                WARNING,
                f"GPU {number} has {gibibytes(gpu.free_bytes)} of {gibibytes(gpu.total_bytes)} free",
                "End the processes that hold it (nvidia-smi); `ep-a2a plan` says what an op needs.",
            )


def _compilation(info: SystemInfo) -> Iterator[Diagnostic]:
    host, cache = info.host, info.host.triton_cache
    yield from every(
        "compiler",
        (
            ERROR,
            not host.compiler,
            "no C compiler; Triton builds its launcher with one",
            "apt-get install gcc, or set CC to one.",
        ),
        (
            ERROR,
            not host.python_header,
            "Python.h is missing; Triton's launcher includes it",
            "Install Python's headers: apt-get install python3-dev",
        ),
    )
    yield from first(
        "Triton's cache",
        (ERROR, not cache.writable, f"{cache.path} cannot be written to", OTHER_CACHE),
        (ERROR, cache.unsafe, f"code in {cache.path} is not executed: {cache.unsafe}", OTHER_CACHE),
        (ERROR, cache.no_exec, f"{cache.path} is on a disk mounted noexec", OTHER_CACHE),
        (WARNING, cache.free_bytes < GIB, f"{gibibytes(cache.free_bytes)} free at {cache.path}", OTHER_CACHE),
    )
    yield from first(
        "TRITON_INTERPRET",
        (
            WARNING,
            info.environment.get("TRITON_INTERPRET", "0") not in ("", "0"),
            "set: an engine's own kernels are interpreted, ours are not",
            "Unset it.",
        ),
    )
