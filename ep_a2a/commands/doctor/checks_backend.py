"""Checks of a backend that stands on another project's library: the library, the GPUs, the sizes, the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.diagnostic import Finding, error, note, ok, warning
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.commands.doctor.system_info import Backend, Machine
    from ep_a2a.managers.capabilities import Capabilities

AMD, NVIDIA = "AMD", "NVIDIA"
"""Makers of GPUs, as capabilities name them."""
COLLECTIVE_BACKENDS = ("naive", "allgather_reducescatter")
"""Backends that call torch.distributed's collectives; all others but DEFAULT_BACKEND stand on a library."""
USE_ANOTHER = f"Use another backend: {DEFAULT_BACKEND}, or {COLLECTIVE_BACKENDS[1]}; `ep-a2a backends` lists them."


def stands_on_library(backend: str) -> bool:
    """Whether a backend, "" being none, runs another project's kernels."""
    return backend not in ("", DEFAULT_BACKEND, *COLLECTIVE_BACKENDS)


def check_library(machine: Machine) -> list[Finding]:
    """Whether the library of the backend that is asked for can be used."""
    backend = machine.backend
    if not stands_on_library(backend.name):
        return []
    if backend.declaration_problem:
        if machine.torch.version is None or machine.torch.problem:
            return [note("library", f"that of {backend.name} has not been asked for: it needs torch")]
        return [error("library", f"{backend.name}: {backend.declaration_problem}", USE_ANOTHER)]
    if backend.problem:
        return [error("library", f"{backend.name}: {backend.problem}", f"To install it: {backend.install}.")]
    return [ok("library", f"{backend.library} {backend.version or 'of unknown version'}")]


def check_needs(
    machine: Machine, ranks: tuple[int, ...], hidden_dim: int | None, max_tokens: int | None, quant: str
) -> list[Finding]:
    """What the backend declares that it needs, and does not get.

    Args:
        machine: its `backend` is judged.
        ranks: of each node.
        hidden_dim, max_tokens: None where nothing is said of them.
        quant: cast inside dispatch.
    """
    can = machine.backend.capabilities
    if can is None:
        return []
    sizes = [
        error("sizes", f"{asked}; {machine.backend.name} takes {taken}", USE_ANOTHER)
        for asked, taken in _refused_sizes(can, ranks, hidden_dim, max_tokens, quant)
    ]
    return [*_gpu_problems(machine, can), *sizes, *_network_problems(machine, machine.backend, can, ranks)]


def _gpu_problems(machine: Machine, can: Capabilities) -> list[Finding]:
    torch, wanted = machine.torch, f"{machine.backend.name} needs {' or '.join(can.gpus)} GPUs"
    if not torch.num_gpus:
        return [] if can.runs_on_cpu else [error("GPUs of the backend", f"none here; {wanted}", USE_ANOTHER)]
    found = AMD if torch.hip_build else NVIDIA
    return [] if found in can.gpus else [error("GPUs of the backend", f"{found} here; {wanted}", USE_ANOTHER)]


def _refused_sizes(
    can: Capabilities, ranks: tuple[int, ...], hidden_dim: int | None, max_tokens: int | None, quant: str
) -> Iterator[tuple[str, str]]:
    """(what is asked for, what is taken) of all that the backend does not take. 0 and () in `can` mean: any."""
    num_ranks = sum(ranks)
    if can.single_node and len(ranks) > 1:
        yield f"{len(ranks)} nodes", "one"
    if can.rank_counts and num_ranks not in can.rank_counts:
        yield f"{num_ranks} ranks", f"{', '.join(map(str, can.rank_counts))} ranks"
    if num_ranks < can.min_ranks:
        yield f"{num_ranks} rank", f"{can.min_ranks} or more"
    if can.max_ranks and num_ranks > can.max_ranks:
        yield f"{num_ranks} ranks", f"at most {can.max_ranks}"
    if hidden_dim is not None and can.hidden_sizes and hidden_dim not in can.hidden_sizes:
        yield f"hidden size {hidden_dim}", f"hidden sizes {', '.join(map(str, can.hidden_sizes))}"
    if hidden_dim is not None and can.hidden_multiple and hidden_dim % can.hidden_multiple:
        yield f"hidden size {hidden_dim}", f"multiples of {can.hidden_multiple}"
    if max_tokens is not None and can.max_tokens and max_tokens > can.max_tokens:
        yield f"{max_tokens} tokens of a rank", f"at most {can.max_tokens}"
    if can.dispatch_casts and quant not in can.dispatch_casts:
        yield f"the cast {quant}", f"the casts {', '.join(can.dispatch_casts)}"


def _network_problems(machine: Machine, backend: Backend, can: Capabilities, ranks: tuple[int, ...]) -> list[Finding]:
    if len(ranks) < 2 or can.rdma == "no":
        return []
    if not any(port.state == "ACTIVE" for port in machine.rdma):
        return [
            error("network", f"{backend.name} needs RDMA between nodes; no port here is active",
                  f"Mend the links of the RDMA devices, or use {COLLECTIVE_BACKENDS[1]}.")
        ]  # fmt: skip
    if machine.torch.cuda_build and not machine.host.gpu_direct:
        return [
            warning("network", f"{backend.name} needs NICs that reach GPU memory; there is no nvidia_peermem",
                    "modprobe nvidia_peermem, unless the library uses DMA-BUF.")
        ]  # fmt: skip
    return [ok("network", f"RDMA between nodes, as {backend.name} needs")]
