"""Names what takes part in a benchmark. Modules with contenders, and their libraries, load at first use."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ep_a2a.commands.measure.session import make_config
from ep_a2a.errors import EpA2AError, UnknownNameError, without_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from ep_a2a.commands.measure.session import Session
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.managers.base import All2AllManagerBase
    from ep_a2a.testing.worker import RankContext

REFERENCE_PUSH = "reference_push"
"""Contender that pushes the same bytes and places no rows."""
NATIVE = "ep_a2a"
LOW_LATENCY = ("ep_low_latency", "ep_low_latency_traced")
BETWEEN_NODES = ("ep_a2a_v1", "ep_a2a_v1_ll", "ep_a2a_flat", "ep_a2a_staged", "ep_a2a_nvshmem", "ep_a2a_nvshmem_ll")
"""Kernels and transports that only several nodes have."""
OF_OP = (NATIVE, "ep_a2a_bounded", "ep_a2a_precast")

_NAMES = {
    "reference_push": (REFERENCE_PUSH,),
    "own": (*OF_OP, *LOW_LATENCY, *BETWEEN_NODES),
    "nccl": ("nccl_agrs", "nccl_all_to_all"),
    "flashinfer": ("flashinfer",),
    "deepep": ("deepep", "deepep_low_latency"),
    "overlap": ("in_turn", "unsplit", "overlapped", "shared"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
MICRO_BATCHES = _NAMES["overlap"]
"""Contenders of --micro-batches. The name of the third goes on with /N, the multiprocessors of their exchanges."""
CONTENDERS = tuple(name for name in _MODULES if name not in MICRO_BATCHES)
"""Contenders that do round trips, in the order of reports."""
LAYERS = (REFERENCE_PUSH, NATIVE, "flashinfer", "nccl_agrs")
"""Contenders of --layer. Of the reference push, the round trip alone is timed."""

ON_SHARED_GPUS = frozenset((REFERENCE_PUSH, *OF_OP, *LOW_LATENCY, *BETWEEN_NODES[:4], *MICRO_BATCHES))
"""Contenders that keep to a share of a GPU. Programs of others would wait for programs that find no room."""

WITHOUT_EFFECT_ON_PUSH = frozenset({"layout", "max_num_tokens", "gpus_per_node"})
"""Fields of a workload that make no difference to the reference push."""

OPS_AT_ONCE = 1
"""Ops of different index in one row: a contender's ops have ended when the next contender starts."""

ONLY_WHEN_NAMED = (*LOW_LATENCY, "ep_a2a_nvshmem", "ep_a2a_nvshmem_ll", "deepep_low_latency")
"""Contenders that no default includes: interfaces on this package's op, NVSHMEM, another mode of a contender."""


def _always(workload: Workload, device: torch.device) -> str | None:
    return None


@dataclass(frozen=True)
class Contender:
    """A way to move tokens. Making one costs nothing; its functions import libraries.

    Attributes:
        name: as given to --contenders and shown in reports.
        round_trip: makes a session of dispatch and combine for a workload. Collective.
        layer: makes a session of a whole layer for a LayerWorkload. Collective.
        unavailable: says why a workload cannot run on this device, in words; None where it can. Local.
    """

    name: str
    round_trip: Callable[[Workload, RankContext], Session] | None = None
    layer: Callable[..., Session] | None = None
    unavailable: Callable[[Workload, torch.device], str | None] = _always

    def prepare(self, workload: Workload, context: RankContext) -> Session:
        """Returns a session for this workload. Collective."""
        make = self.layer if workload.is_layer else self.round_trip
        assert make is not None, "names are checked before"
        return make(workload, context)


def micro_batch_names(num_sms: Iterable[int]) -> tuple[str, ...]:
    """Returns what --micro-batches runs, for these numbers of multiprocessors; 0 = no bound."""
    in_turn, unsplit, beside, shared = MICRO_BATCHES
    return REFERENCE_PUSH, in_turn, unsplit, *(f"{beside}/{each}" for each in num_sms), shared


def check_names(names: Iterable[str], known: Iterable[str] = CONTENDERS, option: str = "contenders") -> None:
    """Checks a choice by an option.

    Raises:
        UnknownNameError: a name is not known.
    """
    for name in names:
        if name not in known:
            raise UnknownNameError(f"out of {', '.join(known)}", repr(name), field=option)


def make_contender(name: str) -> Contender:
    """Returns the contender of this name: the one in its module's tuple `CONTENDERS`, or one with /N.

    Raises:
        UnknownNameError: there is none.
    """
    base, _, number = name.partition("/")
    check_names([base], _MODULES)
    module = importlib.import_module(f"ep_a2a.commands.bench.{_MODULES[base]}")
    known: tuple[Contender, ...] = (module.beside(base, int(number)),) if number else module.CONTENDERS
    return next(each for each in known if each.name == name)


def library_refusal(manager: type[All2AllManagerBase], workload: Workload, device: torch.device) -> str | None:
    """Returns why a library cannot run a workload here, as its backend says it; None where it can. Local.

    The library chooses the layout of its rows.
    """
    if device.type != "cuda":
        return "needs GPUs"
    library, can = manager.library, manager.capabilities
    if library is not None and (problem := library.problem()):
        return f"{problem} ({library.install})"
    try:
        config = make_config(replace(workload, layout=can.layouts[0]), 0)
    except EpA2AError as error:
        return without_section(str(error))
    refusal = can.refusal(manager.backend, config, workload.num_nodes)
    return None if refusal is None else without_section(str(refusal))
