"""Checks of a backend that runs another project's kernels: its library, GPUs, sizes and network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Diagnostic, every, first
from ep_a2a.commands.doctor.system_info import AMD, NVIDIA
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.commands.doctor.backend_verdict import Request
    from ep_a2a.commands.doctor.system_info import SystemInfo

COLLECTIVE_BACKENDS = ("naive", "allgather_reducescatter")
"""Backends that call torch.distributed's collectives; all others but DEFAULT_BACKEND stand on a library."""
USE_ANOTHER = f"Use another backend: {DEFAULT_BACKEND}, or {COLLECTIVE_BACKENDS[1]}; `ep-a2a backends` lists them."


def stands_on_library(backend: str) -> bool:
    """Whether a backend, "" being none, runs another project's kernels."""
    return backend not in ("", DEFAULT_BACKEND, *COLLECTIVE_BACKENDS)


def check_library(info: SystemInfo) -> list[Diagnostic]:
    """Checks the library of the requested backend; [] where the backend needs none."""
    it = info.backend
    return first(
        "library",
        (
            NOTE,
            it.declaration_problem and not info.torch.works,
            f"not probed: {it.name} needs torch, which cannot be imported",
        ),
        (ERROR, it.declaration_problem, f"{it.name}: {it.declaration_problem}", USE_ANOTHER),
        (ERROR, it.problem, f"{it.name}: {it.problem}", f"To install it: {it.install}."),
        (OK, stands_on_library(it.name), f"{it.library} {it.version or 'of unknown version'}"),
    )


def check_needs(info: SystemInfo, request: Request, ranks: tuple[int, ...]) -> Iterator[Diagnostic]:
    """Checks what the backend of `info` declares that it needs.

    Args:
        info: the machine, with the requested backend.
        request: the sizes; None does not judge one.
        ranks: of each node.
    """
    name, can = info.backend.name, info.backend.capabilities
    if can is None:
        return
    found = "none" if not info.torch.num_gpus else AMD if info.torch.hip_build else NVIDIA
    yield from first(
        "GPUs of the backend",
        (
            ERROR,
            found not in can.gpus and not (found == "none" and can.runs_on_cpu),
            f"{found} here; {name} needs {' or '.join(can.gpus)} GPUs",
            USE_ANOTHER,
        ),
    )
    num_ranks, num_nodes, hidden, max_tokens = sum(ranks), len(ranks), request.hidden_dim, request.max_tokens
    # 0 and () in capabilities mean: any.
    sizes = (
        (can.single_node and num_nodes > 1, f"{num_nodes} nodes", "one"),
        (
            can.rank_counts and num_ranks not in can.rank_counts,
            f"{num_ranks} ranks",
            f"{', '.join(map(str, can.rank_counts))} ranks",
        ),
        (num_ranks < can.min_ranks, f"{num_ranks} rank", f"{can.min_ranks} or more"),
        (can.max_ranks and num_ranks > can.max_ranks, f"{num_ranks} ranks", f"at most {can.max_ranks}"),
        (
            hidden is not None and can.hidden_sizes and hidden not in can.hidden_sizes,
            f"hidden size {hidden}",
            f"hidden sizes {', '.join(map(str, can.hidden_sizes))}",
        ),
        (
            can.hidden_multiple and (hidden or 0) % can.hidden_multiple,
            f"hidden size {hidden}",
            f"multiples of {can.hidden_multiple}",
        ),
        (
            can.max_tokens and (max_tokens or 0) > can.max_tokens,
            f"{max_tokens} tokens of a rank",
            f"at most {can.max_tokens}",
        ),
        (
            can.dispatch_casts and request.quant not in can.dispatch_casts,
            f"the cast {request.quant}",
            f"the casts {', '.join(can.dispatch_casts)}",
        ),
    )
    yield from every(
        "sizes", *((ERROR, holds, f"{asked}; {name} takes {taken}", USE_ANOTHER) for holds, asked, taken in sizes)
    )
    if num_nodes > 1 and can.rdma != "no":
        yield from first(
            "network",
            (
                ERROR,
                not any(port.state == "ACTIVE" for port in info.rdma),
                f"{name} needs RDMA between nodes; no port here is active",
                f"Mend the links of the RDMA devices, or use {COLLECTIVE_BACKENDS[1]}.",
            ),
            (
                WARNING,
                info.torch.cuda_build and not info.host.gpu_direct,
                f"{name} needs NICs that reach GPU memory; there is no nvidia_peermem",
                "modprobe nvidia_peermem, unless the library uses DMA-BUF.",
            ),
            (OK, True, f"RDMA between nodes, as {name} needs"),
        )
