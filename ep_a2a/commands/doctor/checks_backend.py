"""Checks of a backend that stands on another project's library: the library, the GPUs, the sizes, the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.diagnostic import (
    ERROR,
    NOTE,
    OK,
    WARNING,
    Case,
    Check,
    Diagnostic,
    always,
    error,
    the_machine,
)
from ep_a2a.commands.doctor.system_info import AMD, NVIDIA
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.system_info import SystemInfo
    from ep_a2a.managers.capabilities import Capabilities

COLLECTIVE_BACKENDS = ("naive", "allgather_reducescatter")
"""Backends that call torch.distributed's collectives; all others but DEFAULT_BACKEND stand on a library."""
USE_ANOTHER = f"Use another backend: {DEFAULT_BACKEND}, or {COLLECTIVE_BACKENDS[1]}; `ep-a2a backends` lists them."


def stands_on_library(backend: str) -> bool:
    """Whether a backend, "" being none, runs another project's kernels."""
    return backend not in ("", DEFAULT_BACKEND, *COLLECTIVE_BACKENDS)


check_library = Check("library", lambda info: (info,) if stands_on_library(info.backend.name) else (),
    Case(NOTE, lambda it: it.backend.declaration_problem and not it.torch.works,
         "that of {it.backend.name} has not been asked for: it needs torch"),
    Case(ERROR, lambda it: it.backend.declaration_problem, "{it.backend.name}: {it.backend.declaration_problem}",
         USE_ANOTHER),
    Case(ERROR, lambda it: it.backend.problem, "{it.backend.name}: {it.backend.problem}",
         "To install it: {it.backend.install}."),
    Case(OK, lambda it: it.backend.version, "{it.backend.library} {it.backend.version}"),
    Case(OK, always, "{it.backend.library} of unknown version"))  # fmt: skip
"""Whether the library of the backend that is asked for can be used."""


def check_needs(
    info: SystemInfo, ranks: tuple[int, ...], hidden_dim: int | None, max_tokens: int | None, quant: str
) -> list[Diagnostic]:
    """Returns what the backend of `info` declares that it needs, and does not get.

    Args:
        info: the machine, with the backend that is asked for.
        ranks: of each node.
        hidden_dim, max_tokens: sizes asked for; None does not judge them.
        quant: cast inside dispatch.
    """
    name, can = info.backend.name, info.backend.capabilities
    if can is None:
        return []
    diagnostics = []
    found = "none" if not info.torch.num_gpus else AMD if info.torch.hip_build else NVIDIA
    if found not in can.gpus and not (found == "none" and can.runs_on_cpu):
        diagnostics.append(
            error("GPUs of the backend", f"{found} here; {name} needs {' or '.join(can.gpus)} GPUs", USE_ANOTHER)
        )
    diagnostics += [
        error("sizes", f"{asked}; {name} takes {taken}", USE_ANOTHER)
        for asked, taken in _refused_sizes(can, ranks, hidden_dim, max_tokens, quant)
    ]
    return diagnostics + (_network(info) if len(ranks) > 1 and can.rdma != "no" else [])


def _refused_sizes(
    can: Capabilities, ranks: tuple[int, ...], hidden: int | None, max_tokens: int | None, quant: str
) -> list[tuple[str, str]]:
    """(what is asked for, what is taken) of all that the backend refuses. 0 and () in capabilities mean: any."""
    num_ranks, num_nodes = sum(ranks), len(ranks)
    table = (
        (can.single_node and num_nodes > 1, f"{num_nodes} nodes", "one"),
        (can.rank_counts and num_ranks not in can.rank_counts, f"{num_ranks} ranks",
         f"{', '.join(map(str, can.rank_counts))} ranks"),
        (num_ranks < can.min_ranks, f"{num_ranks} rank", f"{can.min_ranks} or more"),
        (can.max_ranks and num_ranks > can.max_ranks, f"{num_ranks} ranks", f"at most {can.max_ranks}"),
        (hidden is not None and can.hidden_sizes and hidden not in can.hidden_sizes, f"hidden size {hidden}",
         f"hidden sizes {', '.join(map(str, can.hidden_sizes))}"),
        (can.hidden_multiple and (hidden or 0) % can.hidden_multiple, f"hidden size {hidden}",
         f"multiples of {can.hidden_multiple}"),
        (can.max_tokens and (max_tokens or 0) > can.max_tokens, f"{max_tokens} tokens of a rank",
         f"at most {can.max_tokens}"),
        (can.dispatch_casts and quant not in can.dispatch_casts, f"the cast {quant}",
         f"the casts {', '.join(can.dispatch_casts)}"),
    )  # fmt: skip
    return [(asked, taken) for is_refused, asked, taken in table if is_refused]


_network = Check("network", the_machine,
    Case(ERROR, lambda it: not any(port.state == "ACTIVE" for port in it.rdma),
         "{it.backend.name} needs RDMA between nodes; no port here is active",
         f"Mend the links of the RDMA devices, or use {COLLECTIVE_BACKENDS[1]}."),
    Case(WARNING, lambda it: it.torch.cuda_build and not it.host.gpu_direct,
         "{it.backend.name} needs NICs that reach GPU memory; there is no nvidia_peermem",
         "modprobe nvidia_peermem, unless the library uses DMA-BUF."),
    Case(OK, always, "RDMA between nodes, as {it.backend.name} needs"))  # fmt: skip
