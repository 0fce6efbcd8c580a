"""Judges which backend and kernel a configuration gets on this machine, why, and whether it works. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.checks_backend import COLLECTIVE_BACKENDS, check_needs
from ep_a2a.commands.doctor.checks_gpu import FP8_CAPABILITY
from ep_a2a.commands.doctor.checks_links import pairs_text
from ep_a2a.commands.doctor.diagnostic import Diagnostic, error, note, ok, warning
from ep_a2a.config.enums import picked_kernel
from ep_a2a.config.file import DEFAULT_BACKEND, choose_backend, read_config_file
from ep_a2a.errors import EpA2AError
from ep_a2a.managers.registry import check_backend_name

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.system_info import Backend, SystemInfo

CPU_RANKS = 4
PORTABLE = "allgather_reducescatter"
USE_PORTABLE = f"Use the {PORTABLE} backend (EP_A2A_BACKEND={PORTABLE}), or other GPUs."
ROW_ALIGNMENT_BYTES = 16
GROUP_ELEMENTS = 128


@dataclass(frozen=True)
class Request:
    """A configuration to be judged.

    Attributes:
        backend: named by the caller; None takes the config file, then EP_A2A_BACKEND, then the default.
        config_file: a TOML file; None takes EP_A2A_CONFIG.
        ranks_per_node: ranks of each node; () is one node with a rank per visible GPU, or four on CPU.
        hidden_dim: elements of a token's row, of 2 bytes; None does not judge it.
        quant: cast inside dispatch: "none", "fp8_per_token" or "fp8_per_1x128".
        max_tokens: tokens per rank; None does not judge memory.
        needed_bytes: what `ep-a2a plan` says that an op takes on each rank; None where it says nothing.
    """

    backend: str | None = None
    config_file: str | None = None
    ranks_per_node: tuple[int, ...] = ()
    hidden_dim: int | None = None
    quant: str = "none"
    max_tokens: int | None = None
    needed_bytes: int | None = None


@dataclass(frozen=True)
class BackendVerdict:
    """What a configuration gets.

    Attributes:
        backend, backend_reason: the name, and who chose it. kernel, kernel_reason: what moves tokens, and why.
        device: "cpu" or "cuda". ranks_per_node: as asked, or as the machine is.
        diagnostics: what was chosen, and what keeps it from working.
    """

    backend: str
    backend_reason: str
    kernel: str
    kernel_reason: str
    device: str
    ranks_per_node: tuple[int, ...]
    diagnostics: tuple[Diagnostic, ...]


def judge_backend(info: SystemInfo, request: Request) -> BackendVerdict:
    """Judges a configuration by the rules of init_dist_env and the managers, from the facts about this machine."""
    on_gpus = bool(info.torch.num_gpus)
    ranks = requested_ranks(info, request)
    try:
        name, reason = _backend(request)
    except EpA2AError as problem:
        diagnostics = [error("backend", f"expected {problem.expected}; got {problem.got}", problem.remedy)]
        return BackendVerdict("", "", "", "", "cuda" if on_gpus else "cpu", ranks, tuple(diagnostics))
    kernel, why = _kernel(name, ranks, request.max_tokens, info.backend)
    where = f"{sum(ranks)} ranks on {len(ranks)} node{'s' if len(ranks) > 1 else ''}"
    diagnostics = [
        ok("backend", f"{name}: {reason}"),
        ok("kernel", f"{kernel}: {why}, {where}, on {'GPUs' if on_gpus else 'CPU processes'}"),
        *_shape_problems(request, info),
    ]
    if name == DEFAULT_BACKEND:
        diagnostics += [*_node_problems(ranks, on_gpus=on_gpus), *(_gpu_problems(info) if on_gpus else [])]
    elif name == info.backend.name:
        diagnostics += check_needs(info, ranks, request.hidden_dim, request.max_tokens, request.quant)
    if on_gpus and max(ranks) > info.torch.num_gpus:
        diagnostics.append(
            error("ranks", f"{max(ranks)} on a node, {info.torch.num_gpus} GPUs here", "Start one rank per GPU.")
        )
    if name == DEFAULT_BACKEND:
        diagnostics += _memory_problems(info, request, ranks, on_gpus=on_gpus)
    elif request.max_tokens is not None:
        diagnostics.append(note("memory", f"not known for {name}: `ep-a2a plan` counts what {DEFAULT_BACKEND} takes"))
    return BackendVerdict(name, reason, kernel, why, "cuda" if on_gpus else "cpu", ranks, tuple(diagnostics))


def requested_ranks(info: SystemInfo, request: Request) -> tuple[int, ...]:
    """Returns the ranks of each node: the requested ones, else one node with a rank per GPU, or CPU_RANKS processes."""
    return request.ranks_per_node or (info.torch.num_gpus or CPU_RANKS,)


def requested_backend(request: Request) -> str:
    """Returns the backend of a request; "" where there is no such backend, or no such config file."""
    try:
        return _backend(request)[0]
    except EpA2AError:
        return ""


def _backend(request: Request) -> tuple[str, str]:
    path = request.config_file or env.CONFIG.get()
    name = choose_backend(request.backend, request.config_file)
    check_backend_name(name)
    if request.backend:
        return name, "named on the command line"
    if path and read_config_file(path).all2all_backend:
        return name, f"named by {path}"
    return name, f"named by {env.BACKEND.name}" if env.BACKEND.get() else "the default"


def _kernel(name: str, ranks: tuple[int, ...], max_tokens: int | None, backend: Backend) -> tuple[str, str]:
    if name == DEFAULT_BACKEND:
        return picked_kernel(len(ranks), max_tokens)
    if name in COLLECTIVE_BACKENDS:
        return "torch.distributed", f"{name} calls its collectives on any topology"
    if backend.name != name or backend.capabilities is None:
        return "not known", f"{name} runs kernels of a library, which could not be asked for"
    kernel = backend.kernel_between_nodes if len(ranks) > 1 else backend.kernel
    return kernel, f"{name} runs {backend.library}'s kernels"


def _node_problems(ranks: tuple[int, ...], *, on_gpus: bool) -> list[Diagnostic]:
    diagnostics = []
    if len(set(ranks)) > 1:
        diagnostics.append(
            error("nodes", f"unlike numbers of ranks: {', '.join(map(str, ranks))}",
                  f"Start as many ranks on each node, or use {PORTABLE}.")
        )  # fmt: skip
    if len(ranks) > 1 and on_gpus:
        diagnostics.append(
            warning(
                "nodes", "ep_a2a between nodes has run on CPU processes only, not yet on GPUs", f"Or use {PORTABLE}."
            )
        )
    return diagnostics


def _gpu_problems(info: SystemInfo) -> list[Diagnostic]:
    return [
        error(way, f"missing between GPUs {pairs_text(pairs)}; ep_a2a's kernels need it (NVLink)", USE_PORTABLE)
        for way, pairs in info.driver.unreached().items() if pairs
    ]  # fmt: skip


def _shape_problems(request: Request, info: SystemInfo) -> list[Diagnostic]:
    diagnostics = []
    hidden, casts = request.hidden_dim, request.quant != "none"
    row_bytes = (hidden or 0) * (1 if casts else 2)
    if row_bytes % ROW_ALIGNMENT_BYTES:
        diagnostics.append(
            error("hidden size", f"{hidden}: rows of {row_bytes} bytes, not a multiple of {ROW_ALIGNMENT_BYTES}",
                  "Pad the hidden size.")
        )  # fmt: skip
    if request.quant == "fp8_per_1x128" and (hidden or 0) % GROUP_ELEMENTS:
        diagnostics.append(error("hidden size", f"{hidden} is no multiple of {GROUP_ELEMENTS}", "Use fp8_per_token."))
    old = [gpu.name for gpu in info.driver.gpus if gpu.capability and gpu.capability < FP8_CAPABILITY]
    if casts and old:
        diagnostics.append(error("fp8", f"no fp8 casts on {old[0]}, which need compute capability 8.9", "Use no cast."))
    return diagnostics


def _memory_problems(info: SystemInfo, request: Request, ranks: tuple[int, ...], *, on_gpus: bool) -> list[Diagnostic]:
    needed = request.needed_bytes
    if request.max_tokens is None:
        return []
    if needed is None:
        return [note("memory", "`ep-a2a plan` gives no answer for these sizes", "Run it: it says why.")]
    if on_gpus:
        free = min((gpu.free_bytes for gpu in info.driver.gpus if gpu.free_bytes is not None), default=None)
        place, total = "free on the fullest GPU", needed
    else:
        free, place, total = info.host.shared_memory.free_bytes, "free in /dev/shm", needed * max(ranks)
    text = f"{total:,} bytes needed on {'each GPU' if on_gpus else 'this host'}"
    if free is None:
        return [note("memory", text)]
    if total > free:
        return [error("memory", f"{text}, {free:,} {place}", "Lower max_num_inp_token_per_rank, or free memory.")]
    return [ok("memory", f"{text}, {free:,} {place}")]
