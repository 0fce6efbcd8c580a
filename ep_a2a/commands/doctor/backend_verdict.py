"""Judges which backend and kernel a configuration gets on this machine, why, and whether it works. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.checks_backend import COLLECTIVE_BACKENDS, check_needs
from ep_a2a.commands.doctor.checks_gpu import FP8_CAPABILITY
from ep_a2a.commands.doctor.checks_links import pairs_text
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Diagnostic, every, first, refused
from ep_a2a.commands.doctor.system_info import dotted
from ep_a2a.config.enums import picked_kernel
from ep_a2a.config.file import DEFAULT_BACKEND, choose_backend, read_config_file
from ep_a2a.errors import EpA2AError
from ep_a2a.managers.registry import check_backend_name

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    """The backend, kernel and device that a configuration gets.

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
    device = "cuda" if info.torch.num_gpus else "cpu"
    ranks = requested_ranks(info, request)
    try:
        name, reason = _backend(request)
    except EpA2AError as problem:
        return BackendVerdict("", "", "", "", device, ranks, (refused("backend", problem),))
    kernel, why = _kernel(name, ranks, request.max_tokens, info.backend)
    where = f"{sum(ranks)} ranks on {len(ranks)} node{'s' if len(ranks) > 1 else ''}"
    diagnostics = (
        Diagnostic("backend", OK, f"{name}: {reason}"),
        Diagnostic("kernel", OK, f"{kernel}: {why}, {where}, on {'GPUs' if device == 'cuda' else 'CPU processes'}"),
        *_check_shape(info, request),
        *(_check_reach(info, ranks) if name == DEFAULT_BACKEND else ()),
        *(check_needs(info, request, ranks) if name == info.backend.name else ()),
        *_check_ranks(info, ranks, name),
        *(_check_memory(info, request, ranks, name) if request.max_tokens is not None else ()),
    )
    return BackendVerdict(name, reason, kernel, why, device, ranks, diagnostics)


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


def _check_shape(info: SystemInfo, request: Request) -> Iterator[Diagnostic]:
    hidden, casts = request.hidden_dim or 0, request.quant != "none"
    row_bytes = hidden * (1 if casts else 2)
    yield from every(
        "hidden size",
        (
            ERROR,
            row_bytes % ROW_ALIGNMENT_BYTES,
            f"{hidden}: rows of {row_bytes} bytes, not a multiple of {ROW_ALIGNMENT_BYTES}",
            "Pad the hidden size.",
        ),
        (
            ERROR,
            request.quant == "fp8_per_1x128" and hidden % GROUP_ELEMENTS,
            f"{hidden} is no multiple of {GROUP_ELEMENTS}",
            "Use fp8_per_token.",
        ),
    )
    old = "".join([gpu.name for gpu in info.driver.gpus if gpu.capability and gpu.capability < FP8_CAPABILITY][:1])
    yield from first(
        "fp8",
        (
            ERROR,
            casts and old,
            f"no fp8 casts on {old}, which need compute capability {dotted(FP8_CAPABILITY)}",
            "Use no cast.",
        ),
    )


def _check_reach(info: SystemInfo, ranks: tuple[int, ...]) -> Iterator[Diagnostic]:
    """Checks what ep_a2a's own kernels need of nodes, and between GPUs."""
    num_gpus = info.torch.num_gpus
    yield from every(
        "nodes",
        (
            ERROR,
            len(set(ranks)) > 1,
            f"unlike numbers of ranks: {', '.join(map(str, ranks))}",
            f"Start as many ranks on each node, or use {PORTABLE}.",
        ),
        (
            WARNING,
            len(ranks) > 1 and num_gpus,
            "between nodes, ep_a2a on GPUs has run on one host's virtual nodes only",
            f"Or use {PORTABLE}.",
        ),
    )
    for way, pairs in info.driver.unreached().items():
        yield from first(
            way,
            (
                ERROR,
                num_gpus and pairs,
                f"missing between GPUs {pairs_text(pairs)}; ep_a2a's kernels need it (NVLink)",
                USE_PORTABLE,
            ),
        )


def _check_ranks(info: SystemInfo, ranks: tuple[int, ...], name: str) -> list[Diagnostic]:
    num_gpus = info.torch.num_gpus
    return first(
        "ranks",
        (
            NOTE,
            0 < num_gpus < max(ranks) and name == DEFAULT_BACKEND,
            f"{max(ranks)} on a node share {num_gpus} GPUs: right, and slower than with a GPU each",
        ),
        (ERROR, 0 < num_gpus < max(ranks), f"{max(ranks)} on a node, {num_gpus} GPUs here", "Start one rank per GPU."),
    )


def _check_memory(info: SystemInfo, request: Request, ranks: tuple[int, ...], name: str) -> list[Diagnostic]:
    needed, free, place, of = request.needed_bytes or 0, info.host.shared_memory.free_bytes, "in /dev/shm", "this host"
    if info.torch.num_gpus:
        needed *= -(-max(ranks) // info.torch.num_gpus)  # ranks that share a GPU
        # -1: not known.
        free = min((gpu.free_bytes for gpu in info.driver.gpus if gpu.free_bytes is not None), default=-1)
        place, of = "on the fullest GPU", "each GPU"
    else:
        needed *= max(ranks)
    text = f"{needed:,} bytes needed on {of}"
    return first(
        "memory",
        (NOTE, name != DEFAULT_BACKEND, f"not known for {name}: `ep-a2a plan` counts what {DEFAULT_BACKEND} takes"),
        (NOTE, len(ranks) > 1, "not known over torch.distributed: `ep-a2a plan --vllm` counts it for a model"),
        (NOTE, request.needed_bytes is None, "`ep-a2a plan` gives no answer for these sizes", "Run it: it says why."),
        (NOTE, free < 0, text),
        (ERROR, needed > free, f"{text}, {free:,} free {place}", "Lower max_num_inp_token_per_rank, or free memory."),
        (OK, True, f"{text}, {free:,} free {place}"),
    )
