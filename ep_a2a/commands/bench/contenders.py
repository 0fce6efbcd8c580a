"""Names what takes part in a benchmark: this package's op as engines may call it, libraries, collectives, pushes.

Libraries are called below their managers' ops, whose conversions would count as the libraries' time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ep_a2a.commands.bench.deepep import ElasticRoundTrip
from ep_a2a.commands.bench.flashinfer import FlashInferRoundTrip
from ep_a2a.commands.bench.layer import layer_over
from ep_a2a.commands.bench.nccl import AllGatherRoundTrip, AllToAllRoundTrip
from ep_a2a.commands.bench.overlap import Overlapped, in_turn, unsplit
from ep_a2a.commands.bench.reference_push import ReferencePush
from ep_a2a.commands.measure.session import OpRoundTrip, OpVariant, make_config
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.config import QuantType
from ep_a2a.errors import EpA2AError, UnknownNameError, without_section
from ep_a2a.managers.external.deepep import DeepEPV2All2AllManager
from ep_a2a.managers.external.flashinfer import FlashInferOneSidedAll2AllManager
from ep_a2a.memory.nvshmem import library_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ep_a2a.commands.measure.session import Session
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.managers.base import All2AllManagerBase
    from ep_a2a.testing.worker import RankContext

REFERENCE_PUSH, NATIVE = "reference_push", "ep_a2a"
LAYERS = (REFERENCE_PUSH, NATIVE, "flashinfer", "nccl_agrs")
"""Contenders of --layer. Of the reference push, the round trip alone is timed."""
MICRO_BATCHES = ("in_turn", "unsplit", "overlapped", "shared")
"""Contenders of --micro-batches. The name of the third goes on with /N, the multiprocessors of their exchanges."""
PEER_MEMORY, STAGED, NVSHMEM = "peer_memory", "torch.distributed", "nvshmem"
VARIANTS = {
    NATIVE: OpVariant(),
    "ep_a2a_bounded": OpVariant(bounds_step=True),
    "ep_a2a_precast": OpVariant(casts_before=True),
    # InterNodeV1 has rings of a few chunks; rings of InterNodeV1LL hold a whole step.
    "ep_a2a_v1": OpVariant(kernel_type=KernelType.InterNodeV1, internode_transport=PEER_MEMORY),
    "ep_a2a_v1_ll": OpVariant(kernel_type=KernelType.InterNodeV1LL, internode_transport=PEER_MEMORY),
    "ep_a2a_flat": OpVariant(kernel_type=KernelType.InterNode, internode_transport=PEER_MEMORY),
    "ep_a2a_staged": OpVariant(kernel_type=KernelType.InterNodeV1, internode_transport=STAGED),
    # On CPU, copies stand for puts.
    "ep_a2a_nvshmem": OpVariant(kernel_type=KernelType.InterNodeV1, internode_transport=NVSHMEM),
}
BETWEEN_NODES = tuple(name for name, variant in VARIANTS.items() if variant.kernel_type is not None)
"""Kernels and transports that only several nodes have."""
ONLY_WHEN_NAMED = ("ep_a2a_nvshmem",)
"""Contenders that no default includes."""
OPS_AT_ONCE = 1
"""Ops of different index in one row: a contender's ops have ended when the next contender starts."""


@dataclass(frozen=True)
class Contender:
    """A way to move tokens.

    Attributes:
        name: as given to --contenders and shown in reports.
        round_trip: makes a session of dispatch and combine for a workload. Collective.
        layer: makes a session of a whole layer for a LayerWorkload. Collective.
        unavailable: says why a workload cannot run on this device, in words; None where it can. Local.
        shares_gpus: whether it keeps to a share of a GPU. Programs of others would wait for programs that find no room.
    """

    name: str
    round_trip: Callable[[Workload, RankContext], Session] | None = None
    layer: Callable[..., Session] | None = None
    unavailable: Callable[[Workload, torch.device], str | None] = lambda workload, device: None
    shares_gpus: bool = False

    def prepare(self, workload: Workload, context: RankContext) -> Session:
        """Returns a session for this workload. Collective."""
        make = self.layer if workload.is_layer else self.round_trip
        assert make is not None, "names are checked before"
        return make(workload, context)


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
        refusal: EpA2AError | None = can.refusal(manager.backend, config, workload.num_nodes)
    except EpA2AError as error:
        refusal = error
    return None if refusal is None else without_section(str(refusal))


def flashinfer_refusal(workload: Workload, device: torch.device) -> str | None:
    """Returns why FlashInfer cannot run this workload here; None where it can."""
    ids = torch.cat([workload.ids(rank) for rank in range(workload.ranks)])
    refusal = library_refusal(FlashInferOneSidedAll2AllManager, workload, device)
    if refusal is None and bool(((ids < 0) | (ids >= workload.experts)).any()):
        refusal = "sends dropped slots to rank 0"
    return refusal


def op_refusal(variant: OpVariant, workload: Workload, device: torch.device) -> str | None:
    """Returns why the op's config refuses the workload, or that the variant would be `ep_a2a` itself."""
    if variant.bounds_step and workload.max_tokens == workload.tokens:
        return "the same as ep_a2a where max_tokens is tokens"
    if variant.casts_before and workload.quant == QuantType.NONE:
        return "the same as ep_a2a without a cast"
    if variant.kernel_type is not None and workload.num_nodes == 1:
        return "all ranks are on one node"
    try:
        make_config(workload, 0, variant)
    except EpA2AError as error:
        return without_section(str(error))
    if variant.internode_transport == NVSHMEM and device.type == "cuda" and library_folder() is None:
        return "no package nvidia-nvshmem"
    return None


def _push_refusal(workload: Workload, device: torch.device) -> str | None:
    return "one rank has no peers" if workload.ranks == 1 else None


def _of_op(name: str, variant: OpVariant) -> Contender:
    make, shares = partial(OpRoundTrip, variant=variant), variant.internode_transport != NVSHMEM
    return Contender(name, make, layer_over(make), partial(op_refusal, variant), shares)


def _micro_batches(name: str, layer: Callable[..., Session]) -> Contender:
    return Contender(name, None, layer, partial(op_refusal, OpVariant()), shares_gpus=True)


_ROUND_TRIPS = (
    Contender(REFERENCE_PUSH, ReferencePush, ReferencePush, _push_refusal, shares_gpus=True),
    *(_of_op(name, variant) for name, variant in VARIANTS.items()),
    Contender("nccl_agrs", AllGatherRoundTrip, layer_over(AllGatherRoundTrip)),
    Contender("nccl_all_to_all", AllToAllRoundTrip),
    Contender("flashinfer", FlashInferRoundTrip, layer_over(FlashInferRoundTrip), flashinfer_refusal),
    Contender("deepep", ElasticRoundTrip, unavailable=partial(library_refusal, DeepEPV2All2AllManager)),
)
CONTENDERS = tuple(each.name for each in _ROUND_TRIPS)
"""Contenders that do round trips, in the order of reports."""


def micro_batch_names(num_sms: Iterable[int]) -> tuple[str, ...]:
    """Returns what --micro-batches runs, for these numbers of multiprocessors; 0 = no bound."""
    one_by_one, whole, beside, shared = MICRO_BATCHES
    return REFERENCE_PUSH, one_by_one, whole, *(f"{beside}/{each}" for each in num_sms), shared


def check_names(names: Iterable[str], known: Iterable[str] = CONTENDERS) -> None:
    """Raises UnknownNameError where one of --contenders is not known."""
    for name in names:
        if name not in known:
            raise UnknownNameError(f"out of {', '.join(known)}", repr(name), field="contenders")


def make_contender(name: str) -> Contender:
    """Returns the contender of this name. Raises UnknownNameError: there is none."""
    base, _, number = name.partition("/")
    check_names([base], (*CONTENDERS, *MICRO_BATCHES))
    one_by_one, whole, _, shared = MICRO_BATCHES
    known = (
        *_ROUND_TRIPS,
        _micro_batches(one_by_one, in_turn),
        _micro_batches(whole, unsplit),
        _micro_batches(f"{base}/{number}", partial(Overlapped, num_sms=int(number or 0))),
        _micro_batches(shared, partial(Overlapped, num_sms=0, shares_sm=True)),
    )
    return next(each for each in known if each.name == name)
