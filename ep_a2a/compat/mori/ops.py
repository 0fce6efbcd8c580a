"""`mori.ops`: MORI's op, with its names, parameters and results, around an op of this package."""

import enum
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Self

import torch

from ep_a2a.compat.mori.combine_input import CombineInput, Registered
from ep_a2a.compat.mori.shmem import current_world
from ep_a2a.compat.parameters import refusals, refused, warn_once, with_refusals
from ep_a2a.config import FP8_DTYPE, EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.config.op_config import TOKEN_DTYPES
from ep_a2a.errors import ClosedError, EpA2AError, UnsupportedError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import DispatchCombineOp, DispatchResult
from ep_a2a.memory.guards import become_closed, is_capturing
from ep_a2a.ops.inputs import in_int32
from ep_a2a.routing import count_ids

__all__ = [
    "TOPK_IDX_DTYPE",
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineOp",
    "EpDispatchCombineQuantType",
    "warmup_jit_kernels",
]

OP = "ops.EpDispatchCombineOp"
TOPK_IDX_DTYPE = torch.int32
CONFIG_HINTS = ("block_num", "warp_num_per_block", "rdma_block_num")
"""Fields of the config that have an effect with launch="manual" only."""


globals().update(refusals("mori", "ops"))


class EpDispatchCombineQuantType(enum.Enum):
    """MORI's casts of combine's rows. Configurations name a cast by text (`quant_type`)."""

    None_ = 0
    Fp8DirectCast = 1
    Fp8BlockwiseQuant = 2
    Fp4BlockwiseQuant = 3


def warmup_jit_kernels(kernel_type: EpDispatchCombineKernelType) -> None:
    """Does nothing: an op compiles its kernels, or finds them in Triton's cache, when it is built."""


@with_refusals("mori", OP)
class EpDispatchCombineOp:
    """MORI's EpDispatchCombineOp. Construction is collective, in the world that `shmem` has made.

    `mori.shmem.shmem_finalize()` gives its memory back. So does `close()`, for the next op, in the same order on all
    ranks. Errors are those of ep_a2a's op, `native`.

    Tokens may have another dtype than `data_type`, the same on all ranks: the first dispatch of a dtype makes an op for
    it, with memory of its own, and cannot be captured.

    Args:
        config: shapes and choices. kernel_type may be any of MORI's: inside a node all run as IntraNode, on virtual
            nodes of one host as they are named, and between hosts as InterNodeV1.

    Attributes:
        native: our op for the dtype of the last dispatch, with the calls that MORI's op lacks (`check`, `set_timeout`,
            `recv_counts`, ...). `set_timeout` and `set_max_sms` change this dtype's op alone.

    Raises:
        NotInitializedError: before shmem_torch_process_group_init.
    """

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        _warn_of_config(config)
        self._make = current_world().make_op
        self._wrap(self._make(config), config)

    @classmethod
    def around(cls, native: DispatchCombineOp) -> Self:
        """Returns MORI's interface to an op that a manager has made."""
        op = cls.__new__(cls)
        op._make = None
        op._wrap(native, native.config)  # noqa: SLF001 - this class
        return op

    _make: Callable[[EpDispatchCombineConfig], DispatchCombineOp] | None

    def _wrap(self, native: DispatchCombineOp, config: EpDispatchCombineConfig) -> None:
        self.config, self.native = config, native
        self._registered: dict[torch.dtype, Registered] = {}
        self._combine_input = CombineInput(native, config, self._registered)
        self._by_dtype = {config.data_type: self._combine_input}
        self._counts_experts = False

    def _choose_native(self, tokens: torch.Tensor) -> None:
        """Makes this step's calls go to the op for the tokens' dtype, which all ranks make when it is new.

        The present op keeps the call, and refuses it, where its step is open or no kernel moves the dtype.

        Raises:
            EpA2AError: the op of any dtype is closed or has failed.
        """
        config, dtype = self.native.config, getattr(tokens, "dtype", None)
        casts_already = config.casts_in_dispatch and dtype == FP8_DTYPE
        if self._make is None or dtype == config.data_type or dtype not in TOKEN_DTYPES or casts_already:
            return
        if self.native.has_open_step:
            return
        for each in self._by_dtype.values():
            each.native.check()
            each.lost_rows.check()
        if dtype not in self._by_dtype:
            if is_capturing(self.native.device):
                raise UnsupportedError(
                    "the first dispatch of a dtype outside of a graph's capture",
                    str(dtype),
                    "Dispatch tokens of this dtype once on all ranks before the capture.",
                )
            made = self._make(replace(self.config, data_type=dtype))
            self._by_dtype[dtype] = CombineInput(made, made.config, self._registered)
        self._combine_input = self._by_dtype[dtype]
        self.native = self._combine_input.native

    @outside_graphs
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
        routing: Any = None,
        return_routing: bool = False,
    ) -> DispatchResult:
        """Sends each token once to every distinct rank that owns one of its experts.

        Args:
            indices: int32 or int64 [T, K] expert ids; others than those of experts are dropped slots.

        Returns:
            (tokens [R, H], weights [R, K] or None, scales [R, S] or None, indices [R, K], total_recv [1]); see
            ep_a2a's EpDispatchCombineOp.dispatch. indices of rows past total_recv are -1.
        """
        if routing is not None or return_routing:
            raise refused("mori", f"{OP}.dispatch", "routing" if routing is not None else "return_routing")
        _warn_of_rdma_blocks("dispatch", rdma_block_num)
        self._choose_native(input)
        self._combine_input.lost_rows.check()
        indices = in_int32(indices)
        result = self.native.dispatch(
            input, weights, scales, indices, block_num, rdma_block_num, warp_per_block, call_local_expert_count
        )
        self._combine_input.own_weights = weights
        return result

    @outside_graphs
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

        Launch numbers have no effect on split calls, and a warning says so once. call_local_expert_count counts in
        `dispatch_recv`.
        """
        _warn_of_launch("dispatch_send", block_num, warp_per_block)
        self._choose_native(input)
        self._combine_input.lost_rows.check()
        indices = in_int32(indices)
        result = self.native.dispatch_send(input, weights, scales, indices)
        self._counts_experts = call_local_expert_count
        self._combine_input.own_weights = weights
        return result

    @outside_graphs
    def dispatch_recv(
        self, block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False
    ) -> None:
        """The second half of `dispatch`; must follow `dispatch_send`."""
        _warn_of_launch("dispatch_recv", block_num, warp_per_block)
        received = self.native.dispatch_recv()
        if call_local_expert_count or self._counts_experts:
            counts = self.local_expert_count
            counts.copy_(count_ids(received.indices, self.config.first_expert, counts.shape[0]))

    @outside_graphs
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
        routing: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums, for each of this rank's tokens, the rows of the distinct ranks it went to, unweighted, in float32.

        Args:
            input: rows in the order of the received ones; they may end at any row past total_recv (shorter input is
                copied once). Fewer rows are refused: on CPU by this call, on GPUs by the next call of the op, since
                only the device knows total_recv. Without an external buffer, rows are taken from the registered buffer
                instead, if it was ever asked for.
            weights: None, or [R, K] in the order of the received rows. This rank's own topk_weights have no effect,
                and a warning says so once.
            indices: this rank's own, as given to dispatch, or None. Those that dispatch returned have no effect, and a
                warning says so once.
            use_external_inp_buf: 0 or 1 instead of the config's; -1 takes that.
            call_reset: without effect, since an op without an error needs no reset.

        Returns:
            (result [M, H], of which the first T rows are this step's; weight sums [M, K] or None).
        """
        if routing is not None:
            raise refused("mori", f"{OP}.combine", "routing")
        _warn_of_rdma_blocks("combine", rdma_block_num)
        rows, weights, own_indices = self._combine_input.of(input, weights, in_int32(indices), use_external_inp_buf)
        result = self.native.combine(rows, weights, own_indices, block_num, rdma_block_num, warp_per_block)
        self._combine_input.own_weights = None
        return result

    @outside_graphs
    def combine_send(
        self,
        input: torch.Tensor,  # noqa: A002
        weights: torch.Tensor | None,
        indices: torch.Tensor | None,
        block_num: int = -1,
        warp_per_block: int = -1,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first half of `combine`, for every kernel type. Returns the tensors that `combine_recv` fills."""
        _warn_of_launch("combine_send", block_num, warp_per_block)
        rows, weights, own_indices = self._combine_input.of(input, weights, in_int32(indices), -1)
        result = self.native.combine_send(rows, weights, own_indices)
        self._combine_input.own_weights = None
        return result

    @outside_graphs
    def combine_recv(self, block_num: int = -1, warp_per_block: int = -1) -> None:
        """The second half of `combine`; must follow `combine_send`."""
        _warn_of_launch("combine_recv", block_num, warp_per_block)
        self.native.combine_recv()

    def reset(self) -> None:
        """Resets the op if its kernels have recorded an error, as MORI's; a step that is well goes on.

        The reset is collective. An error that one rank has recorded reaches all ranks. The error of a combine that was
        given too few rows, which `check` repeats, is forgotten in either case.
        """
        for each in self._by_dtype.values():
            try:
                each.native.check()
            except ClosedError:
                raise
            except EpA2AError:
                each.native.reset()
            each.lost_rows.clear()

    def close(self) -> None:
        """Ends the use of the op and gives its memory to the next one, in the same order on all ranks. Not MORI's."""
        for each in self._by_dtype.values():
            each.native.close()
        become_closed(self, "op")

    @property
    def closed(self) -> bool:
        """Whether the op has been closed, here or as `native`. Not MORI's."""
        return self.native.closed

    @property
    def local_expert_count(self) -> torch.Tensor:
        """Received slots per local expert, int32 [E], filled by dispatch(call_local_expert_count=True)."""
        return self.native.local_expert_count

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Returns memory [R, H] that combine reads where use_external_inp_buf is False. It is plain local memory.

        For one `dtype` of combine's input it is the same memory after dispatches of any dtype.
        """
        return self._combine_input.registered(dtype, hidden_dim)

    def decode_send_flat_idx(self, flat_idx: int) -> tuple[int, int]:
        """(source rank, source token) of an element of get_dispatch_src_token_pos."""
        return divmod(int(flat_idx), self.max_num_tokens_to_send())

    def max_num_tokens_to_send_per_rank(self) -> int:
        """M: the most tokens that a rank dispatches."""
        return self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_send(self) -> int:
        """W * M: the most tokens that all ranks dispatch together."""
        return self.config.world_size * self.config.max_num_inp_token_per_rank

    def max_num_tokens_to_recv_per_rank(self) -> int:
        """The most received rows divided by W."""
        return self.config.max_num_recv_tokens_per_rank

    def max_num_tokens_to_recv(self) -> int:
        """R for M tokens: the most rows that a rank ever receives."""
        return self.config.max_num_recv_tokens

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Returns the source of each received row, int32 [total_recv]: rank * (W * M) + token. Synchronises."""
        return self.native.get_dispatch_src_token_pos()

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """Returns (programs, inter-node programs, warps per program) of a full-sized call."""
        _warn_of_rdma_blocks("get_launch_config", rdma_block_num)
        return self.native.get_launch_config(is_dispatch, block_num, rdma_block_num, warp_per_block)


def _warn_of_config(config: EpDispatchCombineConfig) -> None:
    """Warns of fields that were changed and that the op makes no use of."""
    unused = ("num_qp_per_pe",) if config.launch == "manual" else (*CONFIG_HINTS, "num_qp_per_pe")
    changed = [
        each.name for each in fields(config) if each.name in unused and getattr(config, each.name) != each.default
    ]
    warn_once("mori", "ops.EpDispatchCombineConfig", *changed)


def _warn_of_launch(method: str, block_num: int, warp_per_block: int) -> None:
    """Warns of launch numbers that were given to half a call."""
    if block_num > 0 or warp_per_block > 0:
        warn_once("mori", f"{OP}.{method}", "block_num", "warp_per_block")


def _warn_of_rdma_blocks(method: str, rdma_block_num: int) -> None:
    if rdma_block_num > 0:
        warn_once("mori", f"{OP}.{method}", "rdma_block_num")
