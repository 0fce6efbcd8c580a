"""Dispatch and combine with gradients, as operators of torch that graphs of torch.compile hold.

.. code-block:: python

    received = autograd.dispatch(op, tokens, weights, ids)
    groups = autograd.group(op, received)
    results = experts(groups.rows, groups.ends)
    output = autograd.combine(op, autograd.ungroup(results, groups, received), received)

The backward of a dispatch is a combine, and that of a combine a dispatch, over the same routes: rows of a backward come
where those of the forward lay. Each operator copies its results out of the op's memory and leaves the op ready for any
other call. A combine takes up the step of its dispatch, if nothing has come between; else it repeats the dispatch. A
dispatch in the same memory ends a step that has not been combined. So operators may come in any order, as long as it is
one order on all ranks. A CUDA graph that captures a dispatch captures its combine, too.

Two rules keep that order. torch runs backward in the reverse order of forward, over the same operators on all ranks,
because each one has an input that requires grad whatever a rank freezes. A compiler keeps the order, because operators
have side effects. Activation checkpoints repeat the exchanges of their forward; inside torch.compile, which repeats no
side effects, they save what those return.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_a2a.config import ALIGNMENT_BYTES, EpDispatchCombineConfig, Layout, QuantType
from ep_a2a.effects import keep_order, register, save_results
from ep_a2a.errors import ClosedError, InputError, UnknownNameError, UnsupportedError
from ep_a2a.interface import DispatchResult
from ep_a2a.memory.guards import outside_modes
from ep_a2a.ops.base_op import OPS, BaseOp
from ep_a2a.ops.bounds import StepTokens, num_rows
from ep_a2a.ops.inputs import checked_bounds
from ep_a2a.quantization import dequantize
from ep_a2a.slots import Groups, by_slot, group, sum_slots, ungroup

__all__ = ["Groups", "Received", "Routes", "combine", "dispatch", "group", "ungroup"]

NO_TOKEN = -1
"""The id in rows without a token."""

with outside_modes():
    ANCHOR = torch.zeros((), requires_grad=True)
"""An input of each dispatch that requires grad, so that all ranks run its backward. It gets no gradient."""


class Routes(NamedTuple):
    """What combine, and the backward of both, repeat of a dispatch.

    Attributes:
        ids, step_tokens, tag: as given to dispatch, step_tokens as a list; with reduction="slots" those of rows.
        op, back: the numbers of the dispatch's op, and of the one that takes gradients back.
        num_slots: the rows that each token was sent as.
        link: an empty tensor by which the backward of combine leads to that of dispatch, whatever lies between.
    """

    ids: Tensor
    link: Tensor
    step_tokens: list[int]
    tag: int
    num_slots: int
    op: int
    back: int


class Received(NamedTuple):
    """The rows that a dispatch brought to this rank, ascending by (source rank, source token). They are the caller's.

    R is `op.num_rows(step_tokens)`. Rows without a token hold zeros, and ids -1. In layout compact they come last; in
    rank_major they come last in each source's part.

    Attributes:
        rows: [R, H] of the op's dtype.
        weights: [R, K] float32. None if dispatch was given none.
        ids: [R, K] int32, all K expert ids of the row's token.
        num_rows: [1] int32, the rows that hold a token.
        routes: for combine.
    """

    rows: Tensor
    weights: Tensor | None
    ids: Tensor
    num_rows: Tensor
    routes: Routes


def dispatch(
    op: BaseOp,
    tokens: Tensor,
    weights: Tensor | None,
    ids: Tensor,
    *,
    step_tokens: StepTokens | None = None,
    max_num_tokens: StepTokens | None = None,
    tag: int = 0,
    reduction: str = "ranks",
    back: BaseOp | None = None,
) -> Received:
    """Send each token once to every distinct rank that owns one of its experts. Has gradients in tokens and weights.

    All ranks make the same calls of this module in the same order, and backward on the same ones: a result that one
    rank uses for its loss, all ranks use. It runs on the current stream.

    Args:
        op: of layout compact or rank_major. Keep it open until backward has run.
        tokens: [T, H] of the op's dtype.
        weights: [T, K] float32, or None on all ranks.
        ids: [T, K] int32 global expert ids. An id outside [0, num_experts) is a dropped slot.
        step_tokens, max_num_tokens: by either name, the most tokens of any rank, or of each, as in `op.dispatch`;
            equal on all ranks. None is the most that the op takes.
        tag: a number of this call, as in `op.dispatch`, by which ranks that are in different calls find out.
        reduction: "ranks", or "slots" for results and gradients of tokens whose bits do not depend on the EP size, if
            those of the experts' rows do not. The op then has topk 1 and room for K * T tokens: each slot is sent as a
            token of its own, so K is 1 in what is received, and `combine` adds a token's K rows in float32, in
            ascending slots, and rounds once.
        back: an op of the same sizes, which exchanges gradients; None is `op`, if that has no casts. So rows may travel
            in fp8 and gradients in the tokens' dtype: received rows are as after the cast, and gradients as without it.
            Two handles of a manager share their memory.

    Raises:
        UnknownNameError: another reduction.
        UnsupportedError: gradients cannot travel through this op.
        ClosedError: the op has been closed; also in backward.
        EpA2AError: as of `op.dispatch` and `op.combine`; also in backward.
    """
    back = _checked_back(op, back)
    given = op._bound_given(step_tokens, max_num_tokens)  # noqa: SLF001  one rule for both interfaces
    checked_bounds(op.config, given)
    bounds = list(given) if isinstance(given, Sequence) else [given]
    num_slots = 1
    if reduction == "slots":
        tokens, weights, ids, num_slots = by_slot(op.config, tokens, weights, ids)
        if step_tokens is not None or max_num_tokens is not None:
            bounds = [each * num_slots for each in bounds]
    elif reduction != "ranks":
        raise UnknownNameError("ranks or slots", repr(reduction), field="reduction")
    most = num_rows(op.config, _bound(bounds))
    with _any_int():
        rows, row_weights, row_ids, count, link = torch.ops.ep_a2a.dispatch(
            tokens, weights, ids, ANCHOR, [op.number, back.number], bounds, most, tag
        )
    routes = Routes(ids, link, bounds, tag, num_slots, op.number, back.number)
    return Received(rows, None if weights is None else row_weights, row_ids, count, routes)


def _any_int() -> contextlib.AbstractContextManager[Any]:
    """Context in which one graph holds for all layers, if all that differs is an integer attribute, such as a tag."""
    if torch.compiler.is_dynamo_compiling():
        return torch._dynamo.patch_dynamo_config(allow_unspec_int_on_nn_module=True)  # noqa: SLF001  loaded by now
    return contextlib.nullcontext()


def combine(op: BaseOp, rows: Tensor, received: Received) -> Tensor:
    """Add, for each of this rank's tokens, the rows of the ranks that it went to. Has gradients in rows.

    The same rules hold as for `dispatch`. A result may be combined several times, or not at all, on all ranks.

    Args:
        op: that of the dispatch.
        rows: [R, H] in the order of `received.rows`: of each row the weighted sum over this rank's experts. Rows
            without a token may hold anything; their gradients are zeros.
        received: of the dispatch.

    Returns:
        [T, H] of the op's dtype; zeros for a token without a valid expert.

    Raises:
        InputError: another op than that of the dispatch.
        ClosedError, EpA2AError: as of `dispatch`.
    """
    _require_op(op)
    if not isinstance(received, Received):
        remedy = "Pass what ep_a2a.autograd.dispatch has returned, not what op.dispatch returns."
        raise InputError("received as of ep_a2a.autograd.dispatch", type(received).__name__, remedy)
    ids, link, bounds, tag, num_slots, number, back = received.routes
    if op.number != number:
        raise InputError("the op of the dispatch", "another", "Pass the one that has received these rows.")
    numbers = [number, back], bounds, num_rows(op.config, _bound(bounds)), tag
    sums: Tensor = torch.ops.ep_a2a.combine(rows, ids, received.num_rows, link, *numbers)
    if num_slots == 1:
        return sums
    return sum_slots(sums.view(-1, num_slots, sums.shape[1]).unbind(1))


def _bound(step_tokens: list[int]) -> StepTokens:
    return step_tokens[0] if len(step_tokens) == 1 else step_tokens


def _require_op(op: object) -> None:
    if not isinstance(op, BaseOp):
        raise InputError("an op", type(op).__name__, "Make one by ep_a2a.make_op, or by a manager's get_handle.")


def check_gradients(config: EpDispatchCombineConfig) -> None:
    """Raise UnsupportedError if gradients cannot travel through an op of this config."""
    if config.layout == Layout.EXPERT_MAJOR:
        raise UnsupportedError(
            "layout compact or rank_major for gradients", "expert_major", "Sort received rows by ep_a2a.autograd.group."
        )
    if config.takes_scale or config.data_type != config.combined_dtype or config.local_ids:
        raise UnsupportedError(
            "an op without a given scale, local_ids and another dtype of results for gradients",
            f"dispatch_quant {config.dispatch_quant}, local_ids {config.local_ids}, {config.data_type} to "
            f"{config.combined_dtype}",
            "Make another op for training.",
        )


SIZES = (
    *("rank", "world_size", "hidden_dim", "topk", "total_experts", "max_num_inp_token_per_rank"),
    *("max_num_recv_tokens", "layout", "data_type"),
)
"""Fields in which an op and that of its gradients are equal."""


def _checked_back(op: BaseOp, back: BaseOp | None) -> BaseOp:
    _require_op(op)
    check_gradients(op.config)
    if back is None:
        casts = op.config.dispatch_quant, op.config.combine_quant
        if casts != (QuantType.NONE, QuantType.NONE):
            raise UnsupportedError(
                "an op for gradients beside one with casts",
                f"dispatch_quant {casts[0]}, combine_quant {casts[1]}",
                "Pass back=, an op of the same sizes without casts.",
            )
        return op
    _require_op(back)
    check_gradients(back.config)
    for name in SIZES:
        sizes = getattr(op.config, name), getattr(back.config, name)
        if sizes[0] != sizes[1]:
            raise UnsupportedError(f"back of the op's {name} {sizes[0]}", str(sizes[1]), "Pass an op of equal sizes.")
    return back


class _Exchange(NamedTuple):
    """The two halves of an operator's step, on one op."""

    op: BaseOp
    step_tokens: list[int]
    tag: int

    def dispatch(self, tokens: Tensor, weights: Tensor | None, ids: Tensor) -> DispatchResult:
        weights = None if weights is None else _whole(weights)
        bound = _bound(self.step_tokens)
        return self.op.dispatch(
            _whole(tokens), weights, None, _whole(ids), step_tokens=bound, pad_id=NO_TOKEN, tag=self.tag
        )

    def send(
        self, tokens: Tensor, weights: Tensor | None, ids: Tensor, token: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Dispatch, and leave the step. Returns copies of the rows, their weights, ids and number.

        The number is the step's token, unless one is given: that of the dispatch whose routes this one repeats.
        """
        got = self.dispatch(tokens, weights, ids)
        count = got.total_recv.clone()
        self.op.leave_step(count if token is None else token)
        row_ids = got.indices.flatten(0, -2).clone()
        holds = (row_ids != NO_TOKEN).any(-1, keepdim=True)
        rows, config = got.tokens.flatten(0, -2), self.op.config
        if got.scales is not None:
            rows = dequantize(rows, got.scales.flatten(0, -2), config.dispatch_quant, config.data_type)
        rows = torch.where(holds, rows, 0)
        row_weights = None if got.weights is None else torch.where(holds, got.weights.flatten(0, -2), 0)
        # raises what the op knows by now
        self.op.check()
        return rows, row_weights, row_ids, count

    def bring_back(
        self, rows: Tensor, weights: Tensor | None, ids: Tensor, token: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Combine the step with this token, or one that repeats it. Returns the sums of rows and of weights."""
        out = rows.new_empty((len(ids), rows.shape[-1]))
        if not self.op.take_up_step(token):
            # for the routes: nobody reads the rows
            self.dispatch(out, None, ids)
        weights = None if weights is None else _whole(weights)
        try:
            sums = self.op.combine(_whole(rows), weights, _whole(ids), out=out).weights
        finally:
            if self.op.open_step is not None:
                self.op.leave_step(token)  # refused
        self.op.check()
        return out, None if sums is None else sums[: len(ids)].clone()


@contextlib.contextmanager
def _exchange(number: int, step_tokens: Sequence[int], tag: int) -> Iterator[_Exchange]:
    op = OPS.get(number)
    if op is None or op.closed:
        raise ClosedError("an open op", "a closed one", "Close it behind the last backward.")
    with torch.no_grad():
        yield _Exchange(op, list(step_tokens), tag)


def _whole(tensor: Tensor) -> Tensor:
    """The tensor as calls of an op take it: contiguous and aligned, as gradients and slices need not be."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


@torch.library.custom_op("ep_a2a::dispatch", mutates_args=())
def _dispatch(
    tokens: Tensor,
    weights: Tensor | None,
    ids: Tensor,
    anchor: Tensor,
    ops: Sequence[int],
    step_tokens: Sequence[int],
    num_rows: int,
    tag: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _exchange(ops[0], step_tokens, tag) as exchange:
        rows, row_weights, row_ids, count = exchange.send(tokens, weights, ids)
        if row_weights is None:
            row_weights = rows.new_empty((len(rows), 0), dtype=torch.float32)
        return rows, row_weights, row_ids, count, rows.new_empty(0)


@torch.library.custom_op("ep_a2a::combine", mutates_args=())
def _combine(
    rows: Tensor,
    ids: Tensor,
    token: Tensor,
    link: Tensor,
    ops: Sequence[int],
    step_tokens: Sequence[int],
    num_rows: int,
    tag: int,
) -> Tensor:
    with _exchange(ops[0], step_tokens, tag) as exchange:
        return exchange.bring_back(rows, None, ids, token)[0]


@torch.library.custom_op("ep_a2a::dispatch_backward", mutates_args=())
def _dispatch_backward(
    rows: Tensor, weights: Tensor, ids: Tensor, token: Tensor, op: int, step_tokens: Sequence[int], tag: int
) -> tuple[Tensor, Tensor]:
    with _exchange(op, step_tokens, tag) as exchange:
        sums, weight_sums = exchange.bring_back(rows, weights if weights.shape[-1] else None, ids, token)
        return sums, weights.new_empty((len(ids), 0)) if weight_sums is None else weight_sums


@torch.library.custom_op("ep_a2a::combine_backward", mutates_args=())
def _combine_backward(
    grad: Tensor, ids: Tensor, token: Tensor, op: int, step_tokens: Sequence[int], num_rows: int, tag: int
) -> Tensor:
    with _exchange(op, step_tokens, tag) as exchange:
        return exchange.send(grad, None, ids, token)[0]


@_dispatch.register_fake
def _(tokens: Tensor, weights: Tensor | None, ids: Tensor, anchor: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
    keep_order()
    topk, num_rows = ids.shape[1], numbers[2]
    return (
        tokens.new_empty((num_rows, tokens.shape[1])),
        tokens.new_empty((num_rows, 0 if weights is None else topk), dtype=torch.float32),
        ids.new_empty((num_rows, topk)),
        ids.new_empty(1),
        tokens.new_empty(0),
    )


@_combine.register_fake
def _(rows: Tensor, ids: Tensor, *_: Any) -> Tensor:
    keep_order()
    return rows.new_empty((ids.shape[0], rows.shape[1]))


@_dispatch_backward.register_fake
def _(rows: Tensor, weights: Tensor, ids: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return rows.new_empty((ids.shape[0], rows.shape[1])), weights.new_empty((ids.shape[0], weights.shape[1]))


@_combine_backward.register_fake
def _(grad: Tensor, ids: Tensor, token: Tensor, op: int, step_tokens: Sequence[int], num_rows: int, _: int) -> Tensor:
    return grad.new_empty((num_rows, grad.shape[1]))


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weights, ids, _, (_, ctx.back), ctx.step_tokens, _, ctx.tag = inputs
    ctx.has_weights = weights is not None
    ctx.mark_non_differentiable(output[2], output[3])
    ctx.save_for_backward(ids, output[3])


def _back_to_tokens(ctx: Any, rows: Tensor, weights: Tensor, *_: Any) -> tuple[Any, ...]:
    save_results(torch.ops.ep_a2a.dispatch.default)
    grads = torch.ops.ep_a2a.dispatch_backward(rows, weights, *ctx.saved_tensors, ctx.back, ctx.step_tokens, ctx.tag)
    return grads[0], grads[1] if ctx.has_weights else None, *(None,) * 6


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, token, _, (_, ctx.back), ctx.step_tokens, ctx.num_rows, ctx.tag = inputs
    ctx.save_for_backward(ids, token)


def _back_to_rows(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    save_results(torch.ops.ep_a2a.combine.default)
    numbers = ctx.back, ctx.step_tokens, ctx.num_rows, ctx.tag
    rows = torch.ops.ep_a2a.combine_backward(grad, *ctx.saved_tensors, *numbers)
    return rows, None, None, rows.new_empty(0), *(None,) * 4


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise UnsupportedError(
        "first derivatives only", "a derivative of gradients", "Call backward or grad without create_graph=True."
    )


_dispatch.register_autograd(_back_to_tokens, setup_context=_save_dispatch)
_combine.register_autograd(_back_to_rows, setup_context=_save_combine)
_dispatch_backward.register_autograd(_no_second_derivative)
_combine_backward.register_autograd(_no_second_derivative)
register("dispatch", "combine", "dispatch_backward", "combine_backward")
