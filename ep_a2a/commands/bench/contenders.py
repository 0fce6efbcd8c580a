"""Names what takes part in a benchmark: this package's op as engines may call it, libraries, collectives, pushes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ep_a2a.commands.bench.layer import Layer, Layers
from ep_a2a.commands.bench.libraries import AllGatherRoundTrip, ElasticRoundTrip, FlashInferRoundTrip
from ep_a2a.commands.bench.overlap import Overlapped, in_turn, unsplit
from ep_a2a.commands.bench.reference_push import ReferencePush
from ep_a2a.commands.measure.session import InputsRoundTrip, OpRoundTrip, Session, make_config
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.errors import EpA2AError, UnknownNameError, without_section
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.external.deepep import DeepEPV2All2AllManager
from ep_a2a.managers.external.flashinfer import FlashInferOneSidedAll2AllManager
from ep_a2a.memory.nvshmem import library_folder
from ep_a2a.testing.worker import RankContext

Refusal = Callable[[Workload, torch.device], str | None]

REFERENCE_PUSH, NATIVE, IN_TURN, OVERLAPPED = "reference_push", "ep_a2a", "in_turn", "overlapped"
PACKED = "ep_a2a_packed"
PEER_MEMORY, STAGED, NVSHMEM = "peer_memory", "torch.distributed", "nvshmem"
BETWEEN_NODES: dict[str, dict[str, Any]] = {
    # InterNodeV1 has rings of a few chunks; rings of InterNodeV1LL hold a whole step.
    "ep_a2a_v1": {"kernel_type": KernelType.InterNodeV1, "internode_transport": PEER_MEMORY},
    "ep_a2a_v1_ll": {"kernel_type": KernelType.InterNodeV1LL, "internode_transport": PEER_MEMORY},
    "ep_a2a_flat": {"kernel_type": KernelType.InterNode, "internode_transport": PEER_MEMORY},
    "ep_a2a_staged": {"kernel_type": KernelType.InterNodeV1, "internode_transport": STAGED},
    # On CPU, copies stand for puts.
    "ep_a2a_nvshmem": {"kernel_type": KernelType.InterNodeV1, "internode_transport": NVSHMEM},
}
"""Kernels and transports that only several nodes have: fields of the op's config."""
ONLY_WHEN_NAMED = ("ep_a2a_nvshmem",)
"""Contenders that no default includes."""


@dataclass(frozen=True)
class Contender:
    """A way to move tokens.

    Attributes:
        prepare: makes a session for a workload: dispatch and combine, or a layer. Collective.
        unavailable: says why a workload cannot run on this device, in words; None where it can. Local.
        shares_gpus: whether it keeps to a share of a GPU. Programs of others would wait for programs that find no room.
    """

    prepare: Callable[[Any, RankContext], Session]
    unavailable: Refusal = lambda workload, device: None
    shares_gpus: bool = False


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


def op_refusal(workload: Workload, device: torch.device, **changes: Any) -> str | None:
    """Returns why no op can have the workload's config with these changes; None where one can."""
    if changes and workload.num_nodes == 1:
        return "all ranks are on one node"
    try:
        make_config(workload, 0, **changes)
    except EpA2AError as error:
        return without_section(str(error))
    if NVSHMEM in changes.values() and device.type == "cuda" and library_folder() is None:
        return "no package nvidia-nvshmem"
    return None


def _push_refusal(workload: Workload, device: torch.device) -> str | None:
    return "one rank has no peers" if workload.ranks == 1 else None


def _prepare(make: Callable[..., InputsRoundTrip], workload: Workload, context: RankContext) -> Session:
    return Layers(context, [Layer(workload, context, make)]) if workload.intermediate else make(workload, context)


def _of_op(**changes: Any) -> Contender:
    prepare = partial(_prepare, partial(OpRoundTrip, **changes))
    return Contender(prepare, partial(op_refusal, **changes), shares_gpus=NVSHMEM not in changes.values())


CONTENDERS = {
    REFERENCE_PUSH: Contender(ReferencePush, _push_refusal, shares_gpus=True),
    NATIVE: _of_op(),
    **{name: _of_op(**changes) for name, changes in BETWEEN_NODES.items()},
    "nccl_agrs": Contender(partial(_prepare, AllGatherRoundTrip)),
    "flashinfer": Contender(partial(_prepare, FlashInferRoundTrip), flashinfer_refusal),
    "deepep": Contender(ElasticRoundTrip, partial(library_refusal, DeepEPV2All2AllManager)),
}
"""Contenders that do round trips, in the order of reports."""
LAYERS = (REFERENCE_PUSH, NATIVE, "flashinfer", "nccl_agrs")
"""Contenders of --layer. Of the reference push, the round trip alone is timed. With --uneven PACKED is one, too."""
OWN_LAYERS: dict[str, Callable[..., Session]] = {
    PACKED: partial(_prepare, partial(OpRoundTrip, packed=True)),
    IN_TURN: in_turn,
    "unsplit": unsplit,
    OVERLAPPED: Overlapped,
    "shared": partial(Overlapped, shares_sm=True),
}
"""Contenders that only layers have. The name of micro-batches may go on with /N, multiprocessors of their exchanges."""


def micro_batch_names(num_sms: Iterable[int]) -> tuple[str, ...]:
    """Returns what --micro-batches runs, for these numbers of multiprocessors; 0 = no bound."""
    return REFERENCE_PUSH, IN_TURN, "unsplit", *(f"{OVERLAPPED}/{each}" for each in num_sms), "shared"


def check_names(names: Iterable[str], known: Iterable[str] = CONTENDERS) -> None:
    """Raises UnknownNameError where one of --contenders is not known."""
    for name in names:
        if name not in known:
            raise UnknownNameError(f"out of {', '.join(known)}", repr(name), field="contenders")


def make_contender(name: str) -> Contender:
    """Returns the contender of this name. Raises UnknownNameError: there is none."""
    base, _, num_sms = name.partition("/")
    check_names([base], (*CONTENDERS, *OWN_LAYERS))
    if base in CONTENDERS:
        return CONTENDERS[base]
    prepare = OWN_LAYERS[base]
    if num_sms:
        prepare = partial(prepare, num_sms=int(num_sms))
    return Contender(prepare, op_refusal, shares_gpus=True)
