"""DeepEP's normal mode, on ops of layout compact: returns exactly the received rows, with ids of local experts."""

from typing import Any

import torch

from ep_a2a.compat.deep_ep.buffer_base import BufferBase, Tokens
from ep_a2a.compat.deep_ep.layouts import check_num_experts, dispatch_layout, exchange_counts, rank_ids, routed_ids
from ep_a2a.compat.deep_ep.ops import Handle, OpShape
from ep_a2a.compat.deep_ep.utils import EventOverlap
from ep_a2a.compat.deep_ep_sizes import Config
from ep_a2a.config import Layout
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import DtypeError, InputError, ShapeError, TooManyTokensError, UnsupportedError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import DispatchResult
from ep_a2a.routing import destination_mask

Bias = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | list[torch.Tensor | None] | None


class NormalHandle(tuple[Any, ...], Handle):
    """Handle of `dispatch`, with DeepEP's six places; on several nodes with the ten of its internode_dispatch.

    On one node rank_prefix_matrix and is_token_in_rank are there, on several is_token_in_rank and
    recv_gbl_rank_prefix_sum. With num_worst_tokens only is_token_in_rank is. Other places, which only DeepEP's kernels
    need, are None.

    Attributes:
        num_experts: the range of the ids. num_recv_tokens: rows that the caller sees.
    """

    num_experts: int
    num_recv_tokens: int


class NormalMode(BufferBase):
    """The calls of a buffer's normal mode."""

    @outside_graphs
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Counts this rank's tokens by rank, by node and by expert. Local; by torch operations.

        Args:
            topk_idx: [T, K] int64 or int32 expert ids; -1 selects nothing.
            num_experts: over all ranks, a multiple of their number.
            previous_event, async_finish, allocate_on_comm_stream: see `dispatch`.

        Returns:
            num_tokens_per_rank int32 [W], num_tokens_per_rdma_rank int32 [nodes] (None on one node),
            num_tokens_per_expert int32 [num_experts], is_token_in_rank bool [T, W], event.
        """
        self._require_open()
        layout, event = self._stream.run(
            lambda: dispatch_layout(topk_idx, num_experts, self.group_size, self._ops.nodes.num_nodes),
            topk_idx,
            previous_event,
            async_finish,
            beside=True,
        )
        return (*layout, event)

    @outside_graphs
    def dispatch(
        self,
        x: Tokens,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tokens, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap]:
        """Sends each token once to each rank that owns one of its experts.

        Args:
            x: [T, H] bf16 (also fp16, fp32), or (fp8 [T, H], scales [T, S] float32 or int32).
            handle: of an earlier dispatch of T tokens, whose routing is repeated; the host does not wait. topk_idx and
                topk_weights must be None, and the layout tensors have no effect.
            is_token_in_rank, num_tokens_per_expert: of get_dispatch_layout. A token goes to each marked rank; with
                topk_idx only if the rank also owns one of its experts.
            num_tokens_per_rank: required without a handle, without effect. num_tokens_per_rdma_rank: without effect.
            topk_idx, topk_weights: [T, K], float32 weights; or None, both and on all ranks.
            expert_alignment: the list's counts per expert are rounded up to a multiple of this.
            num_worst_tokens: ranks times the most tokens of any rank, equal on all ranks. The host does not wait, and
                this number of rows is returned. 0: the host waits for the counts of all ranks.
            config: only its num_sms has an effect.
            previous_event: an event to wait for, with async_finish in place of the current stream's work.
            async_finish: the current stream does not wait for the call; the returned event marks its end.
            allocate_on_comm_stream: without effect; results may be used on both streams.

        Returns:
            (recv_x, recv_topk_idx, recv_topk_weights, tokens per local expert, handle, event).

            - recv_x: as x; rows ascend by source rank and token.
            - recv_topk_idx [N, K]: ids of this rank's experts, counted from 0; -1 for other experts.
            - recv_topk_weights [N, K]: 0 where the id is -1.
            - tokens per local expert: a list, empty with num_worst_tokens.

            Rows past the received ones hold anything; their ids are -1. With a handle the middle four are None.

        Raises:
            InputError: an argument does not fit.
            TooManyTokensError: more tokens than max_num_tokens_per_rank or num_worst_tokens allow.
        """
        self._require_open()
        tokens, scales = x if isinstance(x, tuple) else (x, None)
        num_sms = self._num_sms(config)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                raise InputError("neither topk_idx nor topk_weights with a handle", "at least one of them")
            rows, event = self._stream.run(
                lambda: self._dispatch_again(handle, tokens, scales, num_sms),
                (tokens, scales, handle.ids),
                previous_event,
                async_finish,
            )
            return rows, None, None, None, None, event
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise InputError("num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert, or a handle", "less")
        self._check_layout(len(tokens), is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        checked_integer("expert_alignment", expert_alignment, 1, kind=InputError)
        checked_integer("num_worst_tokens", num_worst_tokens, 0, kind=InputError)

        def send() -> Any:
            made, counts = self._route(is_token_in_rank, num_tokens_per_expert, topk_idx, num_worst_tokens)
            got = self._send(made, tokens, scales, topk_weights, num_sms)
            per_expert = [-(-count // expert_alignment) * expert_alignment for count in counts]
            rows = _kept_rows(got, made.num_recv_tokens)
            # the ids are the handle's, for the stream to keep
            return rows, *self._local_topk(made, got, topk_idx), per_expert, made, made.ids

        given = (tokens, scales, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        (*results, _), event = self._stream.run(send, given, previous_event, async_finish)
        rows, recv_ids, weights, per_expert, made = results
        return rows, recv_ids, weights, per_expert, made, event

    @outside_graphs
    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Adds, for each of this rank's tokens, the rows of the ranks that it went to, unweighted.

        If the handle's step is over, a dispatch of zeros repeats it first: correct, and slower. Up to max_open_steps
        dispatches can wait for their combine without that.

        Args:
            x: [N, H], a row for each row that dispatch returned; bf16 after a dispatch of fp8 rows.
            handle: of that dispatch; it may be combined again.
            topk_weights: None, or float32 [N, K] in the order of these rows, to sum as well.
            bias: None, one or two [T, H] to add before the sums are rounded.
            config, previous_event, async_finish, allocate_on_comm_stream: see `dispatch`.

        Returns:
            combined_x [T, H], combined_topk_weights [T, K] or None, event.

        Raises:
            InputError: an argument does not fit.
            UnsupportedError: topk_weights of another number of columns than the dispatch's topk_idx, or after none.
        """
        self._require_open()
        num_sms = self._num_sms(config)
        (combined, weights), event = self._stream.run(
            lambda: self._combine(x, handle, topk_weights, bias, num_sms),
            (x, topk_weights, bias, handle.ids),
            previous_event,
            async_finish,
        )
        return combined, weights, event

    internode_dispatch = dispatch
    internode_combine = combine
    """DeepEP's names for the calls between nodes, which dispatch and combine make by themselves."""

    def _route(
        self,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor | None,
        num_worst_tokens: int,
    ) -> tuple[NormalHandle, list[int]]:
        """Returns the handle of a new dispatch, and the tokens that each of this rank's experts receives.

        The host waits for the ranks' counts, unless num_worst_tokens bounds them.
        """
        num_ranks, num_experts = self._ops.world_size, num_tokens_per_expert.shape[0]
        if topk_idx is None:
            ids, is_sent = rank_ids(is_token_in_rank), is_token_in_rank
        else:
            ids = routed_ids(topk_idx, is_token_in_rank, num_experts)
            is_sent = is_token_in_rank & destination_mask(topk_idx, num_experts, num_ranks)
        sent = None
        per_expert: list[int] = []
        if num_worst_tokens:
            step_tokens, num_recv_tokens = num_worst_tokens // num_ranks, num_worst_tokens
            if len(ids) > step_tokens or not step_tokens:
                raise TooManyTokensError(
                    f"at most {step_tokens} tokens on each rank, num_worst_tokens / {num_ranks}",
                    str(len(ids)),
                    "Pass num_worst_tokens = ranks * the most tokens of any rank, the same on all ranks.",
                )
            if topk_idx is None:
                raise InputError("topk_idx and topk_weights with num_worst_tokens, as DeepEP wants them", "none")
        else:
            step_tokens, num_recv_tokens, per_expert, sent = exchange_counts(
                self._ops.groups, self._ops.rank, is_sent, num_tokens_per_expert
            )
        if self._ops.nodes.internode:
            received = None if sent is None else sent[:, self._ops.rank]
            handle = NormalHandle((is_token_in_rank, *[None] * 5, received, None, None, None))
        else:
            handle = NormalHandle((sent, None, None, None, is_token_in_rank, None))
        # without topk_idx one expert stands for each rank
        handle.ids, handle.num_experts = ids, num_ranks if topk_idx is None else num_experts
        handle.step_tokens, handle.num_recv_tokens = step_tokens, num_recv_tokens
        return handle, per_expert

    def _local_topk(
        self, handle: NormalHandle, got: DispatchResult, topk_idx: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the received ids of this rank's experts, counted from 0, else -1; and their weights, else 0."""
        if topk_idx is None or got.weights is None:
            return None, None
        local = _kept(got.indices, handle.num_recv_tokens, -1)
        # rows without a token hold any weight
        weights = _kept(got.weights, handle.num_recv_tokens, 0).masked_fill_(local < 0, 0.0)
        return local.to(topk_idx.dtype), weights

    def _dispatch_again(
        self, handle: NormalHandle, tokens: torch.Tensor, scales: torch.Tensor | None, num_sms: int
    ) -> Tokens:
        """Dispatches other tokens by a handle. The host does not wait. Returns the received rows."""
        if len(tokens) != len(handle.ids):
            raise ShapeError(f"the {len(handle.ids)} tokens of the handle's dispatch", str(len(tokens)))
        handle.step.displace()
        return _kept_rows(self._send(handle, tokens, scales, None, num_sms), handle.num_recv_tokens)

    def _combine(
        self, rows: torch.Tensor, handle: NormalHandle, topk_weights: torch.Tensor | None, bias: Bias, num_sms: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the sums of this rank's tokens [T, H], plus bias, and of their weights [T, K]."""
        num_tokens, topk = handle.ids.shape
        bias_0, bias_1 = _biases(bias, rows, num_tokens)
        if topk_weights is not None and topk_weights.shape[-1] != topk:
            raise UnsupportedError(
                f"topk_weights with the {topk} columns that the handle's dispatch routed by",
                str(tuple(topk_weights.shape)),
                "Pass topk_idx and topk_weights to that dispatch; without them no weights can come back.",
            )
        if not handle.step.is_open:
            self._reopen(handle, None, num_sms)
        op = handle.step.op
        self._ops.limit_sms(op, num_sms)
        out = torch.empty(num_tokens, op.config.hidden_dim, dtype=op.config.combined_dtype, device=rows.device)
        weights = None if topk_weights is None else _whole("topk_weights", topk_weights, handle)
        _, sums = op.combine(_whole("x", rows, handle), weights, None, out=out, bias_0=bias_0, bias_1=bias_1)
        return out, None if sums is None else sums[:num_tokens].clone()

    def _send(
        self,
        handle: NormalHandle,
        tokens: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor | None,
        num_sms: int,
    ) -> DispatchResult:
        """Dispatches tokens by a handle's routing, on an op for their dtype and scales."""
        if scales is not None and scales.dim() != 2:
            raise ShapeError("scales of shape [T, S], S per token", str(tuple(scales.shape)))
        handle.shape = OpShape(
            tokens.dtype,
            tokens.shape[1],
            handle.ids.shape[1],
            handle.num_experts,
            self._ops.max_tokens_for(handle.step_tokens),
            Layout.COMPACT,
            *((0, 0) if scales is None else (scales.shape[1], scales.dtype.itemsize)),
        )
        scales = None if scales is None else scales.contiguous()
        return self._launch(handle, tokens, weights, scales, num_sms=num_sms)

    def _check_layout(
        self,
        num_tokens: int,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
    ) -> None:
        if is_token_in_rank.dtype != torch.bool:
            raise DtypeError("is_token_in_rank of dtype torch.bool", str(is_token_in_rank.dtype))
        expected = (num_tokens, self._ops.world_size)
        if tuple(is_token_in_rank.shape) != expected:
            raise ShapeError(f"is_token_in_rank of shape {expected}", str(tuple(is_token_in_rank.shape)))
        check_num_experts(num_tokens_per_expert.shape[0], self._ops.world_size)
        if (topk_idx is None) != (topk_weights is None):
            raise InputError("topk_idx and topk_weights, or neither", "one of them")
        if topk_idx is not None and topk_idx.shape[0] != num_tokens:
            raise ShapeError(f"topk_idx of {num_tokens} tokens", str(tuple(topk_idx.shape)))


def _whole(name: str, rows: torch.Tensor, handle: NormalHandle) -> torch.Tensor:
    """Returns as many rows as the op's combine takes; those past the received ones may hold anything."""
    if rows.dim() != 2 or rows.shape[0] != handle.num_recv_tokens:
        raise ShapeError(f"{name} with the {handle.num_recv_tokens} rows received", str(tuple(rows.shape)))
    num_rows = handle.step.rows_shape[0]
    if rows.shape[0] >= num_rows:
        return rows[:num_rows]
    whole = torch.empty(num_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
    whole[: rows.shape[0]] = rows
    return whole


def _kept_rows(got: DispatchResult, num_rows: int) -> Tokens:
    """Copies the rows and scales out of the op's memory, since tensors of DeepEP outlive the step."""
    rows = _kept(got.tokens, num_rows, 0)
    return rows if got.scales is None else (rows, _kept(got.scales, num_rows, 0))


def _kept(rows: torch.Tensor, num_rows: int, filler: int) -> torch.Tensor:
    """Returns a copy of the first num_rows of an op's rows, extended by `filler` if the op has fewer."""
    if num_rows <= rows.shape[0]:
        return rows[:num_rows].clone()
    kept = torch.full((num_rows, *rows.shape[1:]), filler, dtype=torch.int32, device=rows.device).to(rows.dtype)
    kept[: rows.shape[0]] = rows
    return kept


def _biases(bias: Bias, x: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the two biases, contiguous.

    Raises:
        InputError: more than two, or one of another shape or dtype than the result.
    """
    given = [bias] if bias is None or isinstance(bias, torch.Tensor) else list(bias)
    if len(given) > 2:
        raise InputError("one bias or a pair", str(len(given)))
    biases = [each for each in given if each is not None]
    for each in biases:
        if tuple(each.shape) != (num_tokens, x.shape[1]):
            raise ShapeError(f"a bias of shape {(num_tokens, x.shape[1])}", str(tuple(each.shape)))
        if each.dtype != x.dtype:
            raise DtypeError(f"a bias of dtype {x.dtype}", str(each.dtype))
    first, second, *_ = *(each.contiguous() for each in biases), None, None
    return first, second
