"""The op interface across nodes: one hop between nodes, to the peer of the same local rank, and one inside a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.errors import AlternationError, ClosedError, UnsupportedError
from ep_a2a.ops import inputs
from ep_a2a.ops.base import DispatchCombineBase, DispatchResult, agree_on_config
from ep_a2a.ops.halves import FirstHalfDoesAll
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.ops.staged_kernels import RailKernels, RailTokens, zeros
from ep_a2a.ops.staged_layout import RailLayout, in_node_config
from ep_a2a.ops.timeouts import WaitBounds

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.memory.node_grid import NodeGrid
    from ep_a2a.memory.node_transport import TorchDistributedRail
    from ep_a2a.memory.rendezvous import Rendezvous


class InterNodeDispatchCombineOp(FirstHalfDoesAll, DispatchCombineBase):
    """EpDispatchCombineOp's interface on several nodes of G ranks each (MORI's InterNodeV1).

    A token crosses to another node once, to the rank there that has this rank's local number, which forwards it to the
    ranks of its node by an IntraNode op. Combine goes back the same way: each node adds its ranks' rows first and
    rounds them to combine_dtype, one row per token crosses back, and the token's own rank adds the nodes' rows in
    ascending order. Both sums are in float32.

    Received rows are arranged by the local rank through which they came: in layout rank_major
    [G, N * max_num_tokens, ·], block g having the tokens of all ranks with local number g, ascending by (source node,
    source token); recv_counts is [G]. In layout compact they are dense, ascending by (local rank, source node, source
    token). Every step sends max_num_tokens lines to each node, whatever the routing: sizes are fixed, so that it can be
    captured in a CUDA graph where the transport can.

    Construction is collective. All ranks must pass the same max_num_tokens. After a RankTimeoutError between nodes the
    rail is broken, which `reset` does not mend: destroy the manager and make a new one.

    Args:
        config: of the whole group; kernel_type InterNodeV1, InterNodeV1LL or AsyncLL, which are one here: each sends a
            whole step at once.
        grid: the nodes, and where this rank is.
        rail: moves lines between the ranks of one local number.
        arena: of the ranks of this node.
        rendezvous: of the whole group.
        index: as of EpDispatchCombineOp.

    Raises:
        ConfigMismatchError, RankTimeoutError: as of EpDispatchCombineOp.
        UnsupportedError: kernel_type is another one.
    """

    def __init__(
        self, config: EpDispatchCombineConfig, grid: NodeGrid, rail: TorchDistributedRail, arena: Arena,
        rendezvous: Rendezvous, index: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(config, arena.device)
        error = None
        if not config.uses_rings:
            error = UnsupportedError(
                "kernel_type InterNodeV1, InterNodeV1LL or AsyncLL on several nodes", config.kernel_type.name,
                "Leave it to the manager.",
            )  # fmt: skip
        agree_on_config(config, rendezvous, index, error)
        self._grid, self._rail = grid, rail
        self._bounds, self._has_combined = WaitBounds.of(config), False
        self._in_node = EpDispatchCombineOp(in_node_config(config, grid), arena=arena, index=index)
        self._kernels = RailKernels(config, grid.num_nodes, self.device)
        layout = RailLayout.of(config, grid.num_nodes)
        self._sent, self._received = (
            RailTokens.allocate(lines, self.device) for lines in (layout.sent, layout.received)
        )
        self._back_sent, self._back_received, self._weights_back = (
            zeros(field, self.device) for field in (layout.sums_sent, layout.sums_received, layout.sum_weights)
        )
        self._output, self._output_weights, self._visits = (
            zeros(field, self.device) for field in (layout.output, layout.output_weights, layout.visits)
        )
        self._kernels.compile(self._sent, self._visits, self._output)
        if self.device.type == "cuda":
            # the first exchange connects, which could not be captured
            self._exchange(self._back_received[: grid.num_nodes], self._back_sent[: grid.num_nodes])
        self._num_tokens, self._max_num_tokens = 0, config.max_num_inp_token_per_rank
        self._closed = False

    @property
    def _bound_secs(self) -> float:
        """Of an exchange now: no combine has ended in a first step, as for the kernels inside of the node."""
        return self._bounds.of_step(is_first=not self._has_combined)

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
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> DispatchResult:
        """Brings each token once to every distinct rank that owns one of its experts; see EpDispatchCombineOp.dispatch.

        Returns:
            (tokens, weights or None, scales or None, indices, total_recv), arranged as the class says.

        Raises:
            InputError: an argument does not fit; nothing was sent.
            AlternationError: the step before has not been combined.
            RankTimeoutError: a rank of this rail did not come within timeout_secs (in the op's first step
                first_timeout_secs), on CPU. One of this node that does not come is recorded by the kernels, and raised
                by the next call.
        """
        self.check()
        self._no_open_half("dispatch")
        if self._in_node.has_open_step:
            raise AlternationError("combine after dispatch", "dispatch again")
        config = self.config
        limit = config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        inputs.check_dispatch(config, self.device, input, weights, scales, indices, limit, pad_id)
        inputs.check_dispatch_addresses(input, scales)
        inputs.check_launch(block_num, warp_per_block)
        scales = inputs.travelling_scales(config, scales)
        self._streams.follow(self.device)
        self._num_tokens, self._max_num_tokens = input.shape[0], limit
        self._kernels.pack(input, scales, weights, indices, self._sent, self._visits, limit)
        has_scales = config.casts_in_dispatch or scales is not None
        num_lines = self._grid.num_nodes * limit
        sent, received = (
            lines.of_step(num_lines, has_weights=weights is not None, has_scales=has_scales)
            for lines in (self._sent, self._received)
        )
        for into, lines in zip(received, sent, strict=True):
            self._exchange(into, lines)
        return self._in_node.dispatch(
            self._received.tokens[:num_lines],
            None if weights is None else self._received.weights[:num_lines],
            None if not has_scales or self._received.scales is None else self._received.scales[:num_lines],
            self._received.ids[:num_lines], block_num, -1, warp_per_block, call_local_expert_count,
            max_num_tokens=num_lines, pad_id=pad_id,
        )  # fmt: skip

    def combine(
        self,
        input: torch.Tensor,  # noqa: A002  MORI's name
        weights: torch.Tensor | None,
        indices: torch.Tensor | None,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        out: torch.Tensor | None = None,
        bias_0: torch.Tensor | None = None,
        bias_1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums, for each of this rank's tokens, the rows of the ranks it went to; see EpDispatchCombineOp.combine.

        Of `indices` only the shape is looked at.

        Returns:
            (result [M, H], of which the first T rows are this step's, or `out`; weight sums [M, K] or None).

        Raises:
            InputError, ForeignIndicesError: an argument does not fit; nothing was sent, combine can be repeated.
            AlternationError: there is no dispatch to combine.
            RankTimeoutError: a rank of this rail did not come within timeout_secs (in the op's first step
                first_timeout_secs), on CPU. One of this node that does not come is recorded by the kernels, and raised
                by the next call.
        """
        self.check()
        self._no_open_half("combine")
        inputs.check_own_indices(self.config, self.device, indices, self._num_tokens)
        result = self._output
        if out is not None:
            inputs.check_out(self.config, self.device, out, self._num_tokens)
            result = out
        inputs.check_biases(self.config, self.device, (bias_0, bias_1), self._num_tokens)
        self._streams.follow(self.device)
        num_lines = self._grid.num_nodes * self._max_num_tokens
        rows = self._back_sent[:num_lines]
        _, sums = self._in_node.combine(input, weights, None, block_num, -1, warp_per_block, out=rows)
        self._exchange(self._back_received[:num_lines], rows)
        weight_rows = None
        if sums is not None:
            weight_rows = self._weights_back[:num_lines]
            self._exchange(weight_rows, sums[:num_lines])
        self._kernels.add_nodes(
            self._back_received, weight_rows, self._visits, (bias_0, bias_1), result, self._output_weights,
            self._num_tokens, self._max_num_tokens,
        )  # fmt: skip
        self._has_combined = True
        return result, None if sums is None else self._output_weights

    def _exchange(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Moves lines [N * max_num_tokens, ...] between nodes."""
        shape = (self._grid.num_nodes, -1)
        blocks = [lines.view(torch.uint8).view(shape) for lines in (received, sent)]
        self._rail.exchange(blocks[0], blocks[1], self._bound_secs)

    @property
    def recv_counts(self) -> torch.Tensor:
        """Rows received through each local rank in the last dispatch, int32 [G], fixed address."""
        return self._in_node.recv_counts

    @property
    def local_expert_count(self) -> torch.Tensor:
        """Received rows per local expert, int32 [E], filled by dispatch(call_local_expert_count=True)."""
        return self._in_node.local_expert_count

    @property
    def expert_recv_count(self) -> torch.Tensor:
        """Rows of each local expert in the last dispatch of layout expert_major, int32 [E], fixed address."""
        return self._in_node.expert_recv_count

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """See EpDispatchCombineOp.get_registered_combine_input_buffer."""
        return self._in_node.get_registered_combine_input_buffer(dtype, hidden_dim)

    @property
    def num_own_bytes(self) -> int:
        """Bytes of the lines between nodes, and of what combine returns."""
        others = (
            self._back_sent,
            self._back_received,
            self._weights_back,
            self._output,
            self._output_weights,
            self._visits,
        )
        return self._sent.num_bytes + self._received.num_bytes + sum(tensor.nbytes for tensor in others)

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Where each received row comes from: int32 [total_recv], source rank * (W * M) + token. Synchronises."""
        grid, most = self._grid, self.config.world_size * self.config.max_num_inp_token_per_rank
        positions = self._in_node.get_dispatch_src_token_pos()
        # inside of the node a row comes from a line of the rank with its source's local number
        local_ranks, lines = positions // most, positions % most
        nodes, tokens = lines // self._max_num_tokens, lines % self._max_num_tokens
        return (nodes * grid.gpus_per_node + local_ranks) * most + tokens

    def set_max_sms(self, max_sms: int) -> None:
        """Bounds the multiprocessors of the launches inside of a node from now on; 0 = all. Local."""
        self._in_node.set_max_sms(max_sms)

    def set_timeout(self, timeout_secs: float) -> None:
        """Bounds the waits of calls from now on, those of a first step included. Local."""
        self._in_node.set_timeout(timeout_secs)
        self._bounds = WaitBounds.same(timeout_secs)

    @property
    def has_open_step(self) -> bool:
        """Whether a dispatch has not been combined, or a half not been finished."""
        return self._in_node.has_open_step or self._open_call is not None

    def check(self) -> None:
        """Raises what the kernels have recorded; does not wait for kernels that still run."""
        if self._closed:
            raise ClosedError("an open op", "a closed one")
        self._in_node.check()

    def reset(self) -> None:
        """Makes the op usable again after an error or an unfinished step. Collective; the step in progress is lost."""
        if self._closed:
            raise ClosedError("an open op", "a closed one")
        self._drop_half()
        self._in_node.reset()
        self._has_combined = False

    def close(self) -> None:
        """Ends the use of the op; local and idempotent."""
        self._closed = True
        self._in_node.close()
