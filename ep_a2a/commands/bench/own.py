"""Runs this package's op as contenders: as an engine calls it, between virtual nodes, and as a low-latency layer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contenders import NATIVE, Contender
from ep_a2a.commands.bench.layer import layer_over
from ep_a2a.commands.measure.session import InputsRoundTrip, OpRoundTrip, OpVariant, identity_experts, make_config
from ep_a2a.compat.triton_distributed import EPLowLatencyAllToAllLayer
from ep_a2a.compat.triton_distributed.phases import make_config as make_layer_config
from ep_a2a.config import FP8_GROUP_SIZE, Layout, QuantType
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.errors import CheckFailedError, EpA2AError, without_section
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.nvshmem import library_folder

if TYPE_CHECKING:
    import torch

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

PEER_MEMORY, STAGED, NVSHMEM = "peer_memory", "torch.distributed", "nvshmem"


class NodesRoundTrip(OpRoundTrip):
    """The op with a kernel or a transport that the policy may not choose between nodes; counts the rows that cross.

    InterNode: every rank writes to every other, and a token crosses once per rank. Rings: once to each other node.
    Staged: M lines to each node whatever the routing.
    """

    def __init__(self, workload: Workload, context: RankContext, variant: OpVariant) -> None:
        self._has_rings = variant.kernel_type is not KernelType.InterNode and variant.internode_transport != STAGED
        super().__init__(workload, context, variant=variant)
        once, flat = workload.rows_between_nodes
        if variant.kernel_type is KernelType.InterNode:
            self.details["rows_between_nodes"] = flat
        elif not self._has_rings:
            lines = workload.world_size * (workload.num_nodes - 1) * workload.max_num_tokens
            self.details |= {"rows_between_nodes": once, "padding_between_nodes": lines - once}

    def check(self) -> None:
        """Checks a round trip, and with rings that one row crossed per token and other node. Collective."""
        from ep_a2a.ops.rings import rows_from_other_nodes

        super().check()
        if not self._has_rings:
            return
        own = rows_from_other_nodes(self.op, self._workload.num_tokens)
        crossed = sum(self._arena.rendezvous.exchange("rows that crossed", own))
        once, flat = self._workload.rows_between_nodes
        if crossed != once:
            raise CheckFailedError(f"{once} rows to cross between nodes, one per token and node", str(crossed))
        self.details |= {"rows_between_nodes": crossed, "rows_between_nodes_flat": flat}


class LowLatencyRoundTrip(InputsRoundTrip):
    """`EPLowLatencyAllToAllLayer`, its two sets of buffers in turn: rows by expert, weights given to combine."""

    def __init__(self, workload: Workload, context: RankContext, *, records_spans: bool = False) -> None:
        super().__init__(workload, context, casts_before=False)
        self._arena = Arena(context.group, context.device)
        try:
            self._layer = EPLowLatencyAllToAllLayer(
                **low_latency_arguments(workload),
                rank=context.rank,
                enable_profiling=records_spans,
                arena=self._arena,
            )
        except Exception:
            self._arena.close()
            raise

    def dispatch(self) -> Any:
        """Sends tokens and ids; combine takes the router's weights."""
        return self._layer.dispatch(self._x, None, self._ids)

    def combine(self, dispatched: Any) -> torch.Tensor:
        """Combines the experts' rows, which lie ready, weighed and added."""
        return self._layer.combine(self._rows, None, self._weights, dispatched[3])

    def run_identity_experts(self, dispatched: Any) -> None:
        """Leaves the received rows as the experts'."""
        tokens, scales, counts, _ = dispatched
        self._rows = identity_experts(self._workload, tokens, scales, counts)

    def check(self) -> None:
        """Checks a round trip through each set of buffers."""
        super().check()
        super().check()
        self.check_timed()

    def check_timed(self) -> None:
        """Checks that no kernel has recorded a failure."""
        for buffers in self._layer.dispatch_ctx.phases:
            buffers.op.check()

    def close(self) -> None:
        """Finalises the layer and gives its memory back."""
        self._layer.finalize()
        self._arena.close()

    def _copies(self) -> torch.Tensor:
        return self._workload.valid_weights(self._context.rank)


def low_latency_arguments(workload: Workload) -> dict[str, Any]:
    """Returns the low-latency layer's arguments that are equal on all ranks."""
    per_token = workload.quant_type == QuantType.FP8_PER_TOKEN
    return {
        "max_m": workload.max_num_tokens,
        "hidden": workload.hidden_dim,
        "topk": workload.topk,
        "online_quant_fp8": workload.quant_type != QuantType.NONE,
        "num_experts": workload.num_experts,
        "local_world_size": workload.world_size,
        "world_size": workload.world_size,
        "fp8_gsize": workload.hidden_dim if per_token else FP8_GROUP_SIZE,
        "dtype": workload.dtype,
    }


def op_refusal(variant: OpVariant, workload: Workload, device: torch.device) -> str | None:
    """Returns why the op's config refuses the workload, or that the variant would be `ep_a2a` itself."""
    if variant.bounds_step and workload.max_num_tokens == workload.num_tokens:
        return "the same as ep_a2a where max_num_tokens is num_tokens"
    if variant.casts_before and workload.quant_type == QuantType.NONE:
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


def _low_latency_refusal(workload: Workload, device: torch.device) -> str | None:
    """Returns why the low-latency layer cannot run the workload; None where it can."""
    if workload.layout != Layout.EXPERT_MAJOR:
        return "has layout expert_major only"
    if workload.quant_type == QuantType.MXFP8 or workload.combine_quant != QuantType.NONE:
        return "knows no mxfp8 and no cast in combine"
    if workload.max_sms or workload.num_nodes > 1:
        return "knows no bound on multiprocessors and one node"
    try:
        make_layer_config(**low_latency_arguments(workload), rank=0)
    except EpA2AError as error:
        return without_section(str(error))
    return None


def _of_op(name: str, variant: OpVariant) -> Contender:
    round_trip = OpRoundTrip if variant.kernel_type is None else NodesRoundTrip
    return Contender(name, partial(round_trip, variant=variant), unavailable=partial(op_refusal, variant))


CONTENDERS = (
    Contender(NATIVE, OpRoundTrip, layer_over(OpRoundTrip), partial(op_refusal, OpVariant())),
    _of_op("ep_a2a_bounded", OpVariant(bounds_step=True)),
    _of_op("ep_a2a_precast", OpVariant(casts_before=True)),
    # InterNodeV1 has rings of a few chunks; rings of InterNodeV1LL hold a whole step.
    _of_op("ep_a2a_v1", OpVariant(kernel_type=KernelType.InterNodeV1, internode_transport=PEER_MEMORY)),
    _of_op("ep_a2a_v1_ll", OpVariant(kernel_type=KernelType.InterNodeV1LL, internode_transport=PEER_MEMORY)),
    _of_op("ep_a2a_flat", OpVariant(kernel_type=KernelType.InterNode, internode_transport=PEER_MEMORY)),
    _of_op("ep_a2a_staged", OpVariant(kernel_type=KernelType.InterNodeV1, internode_transport=STAGED)),
    # On CPU, copies stand for puts.
    _of_op("ep_a2a_nvshmem", OpVariant(kernel_type=KernelType.InterNodeV1, internode_transport=NVSHMEM)),
    _of_op("ep_a2a_nvshmem_ll", OpVariant(kernel_type=KernelType.InterNodeV1LL, internode_transport=NVSHMEM)),
    Contender("ep_low_latency", LowLatencyRoundTrip, unavailable=_low_latency_refusal),
    Contender(
        "ep_low_latency_traced",
        partial(LowLatencyRoundTrip, records_spans=True),
        unavailable=_low_latency_refusal,
    ),
)
