"""MORI's names without a counterpart in this package. Each raises UnsupportedError with a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from ep_a2a.compat.parameters import remedy_of
from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

OP = "ops.EpDispatchCombineOp"
_HANDLE = "ops.dispatch_combine.EpDispatchRoutingHandle"


def refused(function: str, parameter: str = "") -> UnsupportedError:
    """Returns the error for a call that MORI has and this package has not, with the remedy of ep_a2a.compat.parameters.

    Args:
        function: MORI's name for it, below `mori`.
        parameter: the parameter whose value is refused; "" for the whole callable.
    """
    refused_name = f"{parameter} of mori.{function}" if parameter else f"mori.{function}"
    return UnsupportedError(
        "a function or value that ep_a2a.compat.mori offers",
        f"{refused_name}, which only MORI's own kernels have",
        remedy_of("mori", function, parameter),
    )


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
        raise refused(_HANDLE)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Not supported."""
        raise refused(f"{_HANDLE}.tensors")

    @classmethod
    def from_tensors(cls, tensors: Iterable[torch.Tensor], cur_rank_num_token: int = 0) -> Self:
        """Not supported."""
        raise refused(f"{_HANDLE}.from_tensors")


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
        raise refused(f"{OP}.dispatch_standard_moe")

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
        raise refused(f"{OP}.combine_standard_moe")

    def convert_dispatch_output(
        self,
        dispatch_out_x: torch.Tensor,
        dispatch_out_topk_idx: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Any:
        """Not supported as a method: rows by expert are a layout of the config."""
        raise refused(f"{OP}.convert_dispatch_output")

    def convert_combine_input(
        self,
        packed_recv_x: torch.Tensor,
        packed_recv_src_info: torch.Tensor,
        packed_recv_layout_range: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> Any:
        """Not supported as a method: rows by expert are a layout of the config."""
        raise refused(f"{OP}.convert_combine_input")

    def get_debug_time_buf(self) -> Any:
        """Not supported: MORI's time stamps of kernels."""
        raise refused(f"{OP}.get_debug_time_buf")

    def get_debug_time_offset(self) -> Any:
        """Not supported: MORI's time stamps of kernels."""
        raise refused(f"{OP}.get_debug_time_offset")
