"""MORI's names without a counterpart in this package. Each raises UnsupportedError with a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

ROUTING_REMEDY = "Dispatch the tokens again; the routing of a step is kept on the device until its combine."
_BY_EXPERT = 'Build the op with EpDispatchCombineConfig(..., layout="expert_major"): dispatch and combine do it then.'
_TIMES = "Use ep_a2a's own tools: `ep-a2a bench`, or EP_A2A_COUNTERS in vLLM."


def refused(what: str, remedy: str) -> UnsupportedError:
    """Returns the error for a call that MORI has and this package has not.

    Args:
        what: MORI's name for it, with what it does.
        remedy: what the caller can do instead.
    """
    return UnsupportedError(f"mori on MORI's own kernels for {what}", "mori on ep_a2a, which has no such thing", remedy)


class EpDispatchRoutingHandle:
    """MORI's snapshot of a step's routing. Not supported.

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
        """Not supported."""
        raise refused("EpDispatchRoutingHandle.tensors", ROUTING_REMEDY)

    @classmethod
    def from_tensors(cls, tensors: Iterable[torch.Tensor], cur_rank_num_token: int = 0) -> Self:
        """Not supported."""
        raise refused("EpDispatchRoutingHandle.from_tensors", ROUTING_REMEDY)


class UnsupportedOpMethods:
    """The methods of MORI's op that raise UnsupportedError."""

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
        """Not supported as a method: rows by expert are a layout of the config."""
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
        """Not supported as a method: rows by expert are a layout of the config."""
        raise refused("combine_standard_moe", _BY_EXPERT)

    def convert_dispatch_output(
        self,
        dispatch_out_x: torch.Tensor,
        dispatch_out_topk_idx: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Any:
        """Not supported as a method: rows by expert are a layout of the config."""
        raise refused("convert_dispatch_output", _BY_EXPERT)

    def convert_combine_input(
        self,
        packed_recv_x: torch.Tensor,
        packed_recv_src_info: torch.Tensor,
        packed_recv_layout_range: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Any:
        """Not supported as a method: rows by expert are a layout of the config."""
        raise refused("convert_combine_input", _BY_EXPERT)

    def get_debug_time_buf(self) -> Any:
        """Not supported: MORI's time stamps of kernels."""
        raise refused("get_debug_time_buf", _TIMES)

    def get_debug_time_offset(self) -> Any:
        """Not supported: MORI's time stamps of kernels."""
        raise refused("get_debug_time_offset", _TIMES)
