"""`mori.ops.dispatch_combine`: MORI's op, its names, parameters and results, around one of ours."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Self

import torch

from ep_a2a.compat.mori.ops.combine_input import CombineInput
from ep_a2a.compat.mori.ops.counting import count_local_experts
from ep_a2a.compat.mori.ops.unsupported import ROUTING_REMEDY, EpDispatchRoutingHandle, NotHere
from ep_a2a.compat.mori.shmem_context import current_world
from ep_a2a.compat.mori.unsupported import refused
from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.errors import ClosedError, EpA2AError
from ep_a2a.ops.halves import FirstHalfDoesAll

if TYPE_CHECKING:
    from ep_a2a.ops.base import DispatchResult

__all__ = [
    "TOPK_IDX_DTYPE",
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineOp",
    "EpDispatchCombineQuantType",
    "EpDispatchRoutingHandle",
    "warmup_jit_kernels",
]

TOPK_IDX_DTYPE = torch.int32


class EpDispatchCombineQuantType(enum.Enum):
    """MORI's names and values of what combine's rows are cast to; configurations name it by text (`quant_type`)."""

    None_ = 0
    Fp8DirectCast = 1
    Fp8BlockwiseQuant = 2
    Fp4BlockwiseQuant = 3


def warmup_jit_kernels(kernel_type: EpDispatchCombineKernelType) -> None:
    """Does nothing: kernels are compiled, or found in Triton's cache, when an op is built."""


class EpDispatchCombineOp(NotHere):
    """MORI's EpDispatchCombineOp. Construction is collective, in the world that `shmem` has made.

    Its memory is given back by `mori.shmem.shmem_finalize()`, or by `close()`, in the same order on all ranks, to the
    next op. All errors are those of ep_a2a's op (ep_a2a/ops/op.py), which `native` is.

    Args:
        config: shapes and choices. kernel_type may be any of MORI's: inside a node all run as IntraNode, on virtual
            nodes of one host as they are named, and between hosts as InterNodeV1.

    Attributes:
        native: our op, for what MORI has no name for (`check`, `set_timeout`, `recv_counts`, ...).

    Raises:
        NotInitializedError: before shmem_torch_process_group_init.
    """

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        self._wrap(current_world().make_op(config), config)

    @classmethod
    def around(cls, native: Any) -> Self:
        """MORI's interface of an op that a manager has made."""
        op = cls.__new__(cls)
        op._wrap(native, native.config)
        return op

    def _wrap(self, native: Any, config: EpDispatchCombineConfig) -> None:
        self.config, self.native = config, native
        self._combine_input = CombineInput(native, config)
        self._indices: torch.Tensor | None = None

    def dispatch(
        self,
        input: torch.Tensor,  # noqa: A002  MORI's name
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: bool = False,
    ) -> DispatchResult:
        """Sends each token once to every distinct rank that owns one of its experts.

        Returns:
            (tokens [R, H], weights [R, K] or None, scales [R, S] or None, indices [R, K], total_recv [1]); see
            ep_a2a's EpDispatchCombineOp.dispatch. indices of rows past total_recv are -1.
        """
        if routing is not None or return_routing:
            raise refused("dispatch with routing or return_routing", ROUTING_REMEDY)
        return self.native.dispatch(  # type: ignore[no-any-return]
            input, weights, scales, indices, block_num, rdma_block_num, warp_per_block, call_local_expert_count
        )

    def dispatch_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
    ) -> DispatchResult:
        """The first half of `dispatch`, for every kernel type. Returns the tensors that `dispatch_recv` fills.

        Launch numbers have no effect on halves, nor has call_local_expert_count, as in MORI.
        """
        result: DispatchResult = self.native.dispatch_send(input, weights, scales, indices)
        self._indices = result[3]
        return result

    def dispatch_recv(
        self, block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False
    ) -> None:
        """The second half of `dispatch`; must follow `dispatch_send`."""
        self.native.dispatch_recv()
        indices, self._indices = self._indices, None
        if call_local_expert_count and indices is not None:
            count_local_experts(indices, self.config.first_expert, self.local_expert_count)

    def combine(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None,
        indices: torch.Tensor | None,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums, for each of this rank's tokens, the rows of the distinct ranks it went to, unweighted, in float32.

        Args:
            input: rows in the order of the received ones; they may end at any row past total_recv (shorter input is
                copied once). Without an external buffer, rows are taken from the registered buffer instead, if it was
                ever asked for.
            weights: None, or [R, K] in the order of the received rows.
            indices: this rank's own, as given to dispatch, or None.
            use_external_inp_buf: 0 or 1 instead of the config's; -1 takes that.
            call_reset: without effect.

        Returns:
            (result [M, H], of which the first T rows are this step's; weight sums [M, K] or None).
        """
        if routing is not None:
            raise refused("combine with routing", ROUTING_REMEDY)
        rows, weights = self._combine_input.of(input, weights, use_external_inp_buf)
        return self.native.combine(  # type: ignore[no-any-return]
            rows, weights, indices, block_num, rdma_block_num, warp_per_block
        )

    def combine_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None,
        indices: torch.Tensor | None,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first half of `combine`, for every kernel type. Returns the tensors that `combine_recv` fills."""
        rows, weights = self._combine_input.of(input, weights, -1)
        return self.native.combine_send(rows, weights, indices)  # type: ignore[no-any-return]

    def combine_recv(self, block_num: int = -1, warp_per_block: int = -1) -> None:
        """The second half of `combine`; must follow `combine_send`."""
        self.native.combine_recv()

    def reset(self) -> None:
        """Nothing, as in MORI, on an op in order; after an error that kernels have recorded, ep_a2a's collective reset.

        An error that one rank has recorded reaches all of them.
        """
        try:
            self.native.check()
        except ClosedError:
            raise
        except EpA2AError:
            self._indices = None
            self.native.reset()

    def close(self) -> None:
        """Ends the use of the op and gives its memory to the next one. Ours; the same order on all ranks."""
        self.native.close()

    @property
    def local_expert_count(self) -> torch.Tensor:
        """Received rows per local expert, int32 [E], filled by a dispatch with call_local_expert_count=True."""
        counts: torch.Tensor = self.native.local_expert_count
        return counts

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Memory [R, H] that combine reads where use_external_inp_buf is False; plain local memory here."""
        return self._combine_input.registered(dtype, hidden_dim)

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Where received rows come from: int32 [total_recv], source rank * (W * M) + token. Synchronises."""
        positions: torch.Tensor = self.native.get_dispatch_src_token_pos()
        return positions

    def decode_send_flat_idx(self, flat_idx: int) -> tuple[int, int]:
        """(source rank, token) of a value of get_dispatch_src_token_pos."""
        rank, token = self.native.decode_send_flat_idx(int(flat_idx))
        return int(rank), int(token)

    def max_num_tokens_to_send_per_rank(self) -> int:
        """M."""
        return self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_send(self) -> int:
        """W * M."""
        return self.config.world_size * self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """Rows kept per source, on average."""
        return self.config.max_num_recv_tokens_per_rank

    def max_num_tokens_to_recv(self) -> int:
        """R."""
        return self.config.max_num_recv_tokens

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """(programs, inter-node programs, warps per program) that a full-sized call would use."""
        if isinstance(self.native, FirstHalfDoesAll):
            raise refused("get_launch_config of an op across nodes", "Read op.config; launches are chosen per hop.")
        numbers: tuple[int, int, int] = self.native.get_launch_config(
            is_dispatch, block_num, rdma_block_num, warp_per_block
        )
        return numbers
