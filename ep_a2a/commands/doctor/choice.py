"""Which backend, kernel and ranks a request gets, by the rules of init_dist_env and the managers. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.machine import Choice
from ep_a2a.commands.options import named_backend
from ep_a2a.config.enums import picked_kernel
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import EpA2AError

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.machine import Machine, Request

CPU_RANKS = 4
PORTABLE = "allgather_reducescatter"
COLLECTIVE_BACKENDS = ("naive", PORTABLE)
"""Backends that call torch.distributed's collectives; all others but DEFAULT_BACKEND stand on a library."""


def stands_on_library(backend: str) -> bool:
    """Whether a backend, "" being none, runs another project's kernels."""
    return backend not in ("", DEFAULT_BACKEND, *COLLECTIVE_BACKENDS)


def requested_backend(request: Request) -> str:
    """Returns the backend of a request; "" where there is no such backend, or no such config file."""
    try:
        return named_backend(request.backend, request.config_file)[0]
    except EpA2AError:
        return ""


def choose(machine: Machine, request: Request) -> Choice:
    """Returns what a request gets on a machine."""
    ranks = request.ranks_per_node or (machine.torch.num_gpus or CPU_RANKS,)
    device = "cuda" if machine.torch.num_gpus else "cpu"
    try:
        name, reason = named_backend(request.backend, request.config_file)
    except EpA2AError as error:
        found = f"expected {error.expected}; got {error.got}"
        return Choice(device=device, ranks_per_node=ranks, problem=found, remedy=error.remedy)
    return Choice(name, reason, *_kernel(name, machine, request, len(ranks)), device, ranks)


def _kernel(name: str, machine: Machine, request: Request, num_nodes: int) -> tuple[str, str]:
    backend = machine.backend
    if name == DEFAULT_BACKEND:
        return picked_kernel(num_nodes, request.max_tokens)
    if name in COLLECTIVE_BACKENDS:
        return "torch.distributed", f"{name} calls its collectives on any topology"
    if backend.name != name or backend.capabilities is None:
        return "not known", f"{name} runs kernels of a library, which could not be asked for"
    kernel = backend.kernel_between_nodes if num_nodes > 1 else backend.kernel
    return kernel, f"{name} runs {backend.library}'s kernels"
