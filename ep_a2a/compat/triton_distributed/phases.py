"""The two sets of buffers that steps of the layer use in turn. Each set is an op."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.compat.parameters import remedy_of
from ep_a2a.config import FP8_DTYPE, FP8_GROUP_SIZE, EpDispatchCombineConfig, Layout, QuantType, num_owned_experts
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.config.enums import inter_node_kernel
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import AlternationError, ConfigError, UnsupportedError
from ep_a2a.ops.inputs import check_rows, check_tensor, in_int32
from ep_a2a.ops.memory import block_sizes
from ep_a2a.quantization import quantize_groups
from ep_a2a.topology import classify

if TYPE_CHECKING:
    import torch

    from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
    from ep_a2a.topology import Topology, TopologyReport

SCALE_BYTES = 4
WIDEST_ELEMENT_BYTES = 4


def make_config(
    max_m: int,
    hidden: int,
    topk: int,
    num_experts: int,
    online_quant_fp8: bool,
    fp8_gsize: int,
    dtype: torch.dtype,
    world_size: int,
    rank: int,
    local_world_size: int | None = None,
) -> EpDispatchCombineConfig:
    """Returns the op configuration of a layer; arguments are those of EPLowLatencyAllToAllLayer.

    local_world_size: None = world_size.

    Raises:
        ConfigError: a value is impossible.
    """
    gpus_per_node = local_world_size or world_size
    has_scales = online_quant_fp8 or dtype == FP8_DTYPE
    checked_integer("fp8_gsize", fp8_gsize, 1)
    checked_integer("num_experts", num_experts, 1)
    checked_integer("world_size", world_size, 1)
    if has_scales and checked_integer("hidden", hidden, 1) % fp8_gsize:
        raise ConfigError(f"a multiple of fp8_gsize {fp8_gsize} with fp8 tokens", str(hidden), field="hidden")
    quant_type, num_scales = QuantType.NONE, 0
    if online_quant_fp8:
        if dtype == FP8_DTYPE:
            raise ConfigError(
                "dtype before the cast (bfloat16, float16 or float32) with online_quant_fp8",
                "float8_e4m3fn",
                "Pass online_quant_fp8=False for tokens that are all cast already.",
            )
        casts = {hidden: QuantType.FP8_PER_TOKEN, FP8_GROUP_SIZE: QuantType.FP8_PER_1X128}
        quant_type = casts.get(fp8_gsize, QuantType.NONE)
    if has_scales and quant_type is QuantType.NONE:
        num_scales = hidden // fp8_gsize
    return EpDispatchCombineConfig(
        data_type=FP8_DTYPE if num_scales else dtype,
        combine_dtype=dtype if num_scales and online_quant_fp8 else None,
        rank=rank,
        world_size=world_size,
        hidden_dim=hidden,
        scale_dim=num_scales,
        scale_type_size=SCALE_BYTES if num_scales else 0,
        max_token_type_size=WIDEST_ELEMENT_BYTES,
        max_num_inp_token_per_rank=max_m,
        num_experts_per_rank=num_owned_experts(num_experts, world_size, rank),
        num_experts_per_token=topk,
        num_experts=num_experts,
        kernel_type=KernelType.IntraNode if gpus_per_node == world_size else inter_node_kernel(max_m),
        gpu_per_node=gpus_per_node,
        quant_type=quant_type.value,
        layout=Layout.EXPERT_MAJOR.value,
    )


def nodes_of(report: TopologyReport, world_size: int, local_world_size: int | None) -> Topology:
    """Returns the nodes of a layer.

    Args:
        report: the facts about its ranks.
        world_size: the number of ranks.
        local_world_size: ranks of a node; None = the ranks' hosts decide.

    Raises:
        ConfigError: local_world_size would put ranks of two hosts on one node.
        UnsupportedError: local_world_size does not divide world_size.
    """
    if local_world_size is not None and (local_world_size < 1 or world_size % local_world_size):
        raise UnsupportedError(
            f"a local_world_size that divides world_size {world_size}",
            str(local_world_size),
            remedy_of("triton_distributed", "EPLowLatencyAllToAllLayer", "local_world_size"),
        )
    try:
        return classify(report, local_world_size)
    except ConfigError as error:
        error.field = "local_world_size"
        raise


class PhaseBuffers:
    """One op with its own memory, so that steps of both phases may be open at once.

    Args:
        op: the op.
        cast_group: elements that share a scale in a cast that torch makes before dispatch; 0 = none.

    Attributes:
        op: as given. num_tokens: T of its latest dispatch.
    """

    def __init__(self, op: CombineTimeWeightsOp, cast_group: int) -> None:
        self.op = op
        self._cast_group = cast_group
        self.num_tokens = self._num_dispatches = 0
        self._users = 2

    def dispatch(
        self, tokens: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Returns the op's rows [E, W * M, H], scales [E, W * M, S] or None, and the number of this dispatch."""
        if self._cast_group and scales is None:
            tokens, scales = self._cast(tokens)
        rows, _, row_scales, _, _ = self.op.dispatch(tokens, weights, scales, in_int32(indices))
        self.num_tokens = tokens.shape[0]
        self._num_dispatches += 1
        return rows, row_scales, self._num_dispatches

    def _cast(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check_tensor("send_tokens", tokens, (self.op.config.combined_dtype,), self.op.device)
        check_rows("send_tokens", tokens, self.op.config.hidden_dim)
        groups = tokens.view(tokens.shape[0], self.op.config.num_scales, self._cast_group)
        rows, scales = quantize_groups(groups)
        return rows.flatten(1), scales

    def is_open(self, step: int) -> bool:
        """Whether dispatch number `step` is the last one and has not been combined."""
        return step == self._num_dispatches and self.op.has_open_step

    def expect_open(self, step: int) -> None:
        """Raises AlternationError unless dispatch number `step` waits for its combine."""
        if not self.is_open(step):
            raise AlternationError(
                "a dispatch that waits for its combine",
                "the dispatch_meta of one that has been combined, or reset",
                "Call combine once for each dispatch, with the dispatch_meta that it returned.",
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of this phase's buffers on this rank."""
        return block_sizes(self.op.config).num_bytes + self.op.num_inbox_bytes

    def release(self) -> None:
        """Ends the use by one of the layer's two contexts; the second call closes the op."""
        self._users -= 1
        if self._users == 0:
            self.op.close()
