"""What MORI's `mori.ops.dispatch_combine` has and ours has not; all of it raises UnsupportedError with a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from ep_a2a.compat.mori.unsupported import refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

ROUTING_REMEDY = "Dispatch the tokens again; the routing of a step is kept on the device until its combine."
_BY_EXPERT = 'Build the op with EpDispatchCombineConfig(..., layout="expert_major"): dispatch and combine do it then.'
_TIMES = "Use ep_a2a's own tools: `ep-a2a bench`, or EP_A2A_COUNTERS in vLLM."


class EpDispatchRoutingHandle:
    """MORI's snapshot of a step's routing: not here.

    Raises:
        UnsupportedError: always.
    """

    def __init__(
        self,
        disp_dest_tok_id_map: torch.Tensor,
        inter_node_disp_dest_tok_id_map: torch.Tensor,
        inter_node_disp_send_map: torch.Tensor,
        total_recv_token_num: torch.Tensor,
        disp_tok_id_to_src_tok_id_local: torch.Tensor,
        cur_rank_num_token: int = 0,
    ) -> None:
        raise refused("EpDispatchRoutingHandle, which replays a routing", ROUTING_REMEDY)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Not here."""
        raise refused("EpDispatchRoutingHandle.tensors", ROUTING_REMEDY)

    @classmethod
    def from_tensors(cls, tensors: Iterable[torch.Tensor], cur_rank_num_token: int = 0) -> Self:
        """Not here, like the constructor."""
        raise refused("EpDispatchRoutingHandle.from_tensors", ROUTING_REMEDY)


class NotHere:
    """Methods of MORI's op that raise."""

    def dispatch_standard_moe(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor,
        scales: torch.Tensor,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Any:
        """Rows by expert: here a layout of the config."""
        raise refused("dispatch_standard_moe", _BY_EXPERT)

    def combine_standard_moe(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_reset: bool = False,
    ) -> Any:
        """Rows by expert: here a layout of the config."""
        raise refused("combine_standard_moe", _BY_EXPERT)

    def convert_dispatch_output(
        self,
        dispatch_out_x: torch.Tensor,
        dispatch_out_topk_idx: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Any:
        """Rows by expert: here a layout of the config."""
        raise refused("convert_dispatch_output", _BY_EXPERT)

    def convert_combine_input(
        self,
        packed_recv_x: torch.Tensor,
        packed_recv_src_info: torch.Tensor,
        packed_recv_layout_range: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Any:
        """Rows by expert: here a layout of the config."""
        raise refused("convert_combine_input", _BY_EXPERT)

    def get_debug_time_buf(self) -> Any:
        """MORI's time stamps of kernels: not here."""
        raise refused("get_debug_time_buf", _TIMES)

    def get_debug_time_offset(self) -> Any:
        """MORI's time stamps of kernels: not here."""
        raise refused("get_debug_time_offset", _TIMES)
