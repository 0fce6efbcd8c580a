"""Bodies of the tests of DeepEP's interface: on CPU processes (tests/multiprocess) and on GPUs (tests/multigpu) alike.

What DeepEP's own tests of its intranode and low-latency kernels look at, against this project's oracle.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ep_a2a import errors
from ep_a2a.compat.combine_time_weights import WeightExchange
from ep_a2a.compat.deep_ep import Buffer, Config
from ep_a2a.compat.deep_ep.utils import tensors_of
from ep_a2a.config import FP8_DTYPE
from ep_a2a.reference import reduce_experts_reference
from ep_a2a.testing import RankContext
from tests.cases import op_cases
from tests.cases.low_latency_cases import check_sources
from tests.cases.staged_cases import on_hosts

NORMAL = op_cases.Case(
    world_size=2, hidden_dim=128, topk=3, num_experts=6, routing="some_dropped", tokens=((9, 5), (0, 7))
)
LOW_LATENCY = op_cases.Case(
    world_size=2,
    hidden_dim=512,
    topk=2,
    num_experts=4,
    max_tokens=4,
    routing="some_dropped",
    tokens=((4, 3), (0, 2)),
    layout="expert_major",
    quant_type="fp8_per_1x128",
)


def make_buffer(context: RankContext, case: op_cases.Case, **options: Any) -> Buffer:
    options = {"gpus_per_node": case.world_size // case.num_nodes, **options}
    return Buffer(context.group, 0, 0, device=context.device, explicitly_destroy=True, **options)


class Step:
    """One rank's inputs of a step as DeepEP takes them, and what the oracle says that all ranks receive."""

    def __init__(self, case: op_cases.Case, number: int, context: RankContext) -> None:
        self.case, self.number, self.context = case, number, context
        self.everyone = [op_cases.make_inputs(case, number, rank) for rank in range(case.world_size)]
        self.expected = op_cases.reference_of(case, number, self.everyone)
        self.num_local_experts = case.num_experts // case.world_size
        self.first_expert = context.rank * self.num_local_experts
        self.received = self.expected[context.rank]
        inputs = self.everyone[context.rank]
        self.topk_idx, self.topk_weights = self._own(inputs.ids).to(torch.int64), self._own(inputs.weights)
        x = self._own(inputs.tokens)
        # scales with their strides exchanged, as DeepEP's test passes them
        self.x: Any = x if inputs.scales is None else (x, self._own(inputs.scales).T.contiguous().T)

    def _own(self, tensor: torch.Tensor | None) -> torch.Tensor:
        return tensor.to(self.context.device)

    def expert_counts(self, rank: int) -> list[int]:
        """Tokens of all ranks that name each expert of a rank."""
        ids = torch.cat([inputs.ids.flatten() for inputs in self.everyone])
        first = rank * self.num_local_experts
        return [int((ids == expert).sum()) for expert in range(first, first + self.num_local_experts)]

    def layout(self, buffer: Buffer) -> dict[str, Any]:
        """The arguments of dispatch that get_dispatch_layout makes."""
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            self.topk_idx, self.case.num_experts
        )
        nodes = is_in_rank.unflatten(1, (self.case.num_nodes, -1)).any(2)
        assert (None if per_rdma_rank is None else per_rdma_rank.tolist()) == (
            None if self.case.num_nodes == 1 else nodes.sum(0).tolist()
        )
        return {"num_tokens_per_rank": per_rank, "is_token_in_rank": is_in_rank, "num_tokens_per_expert": per_expert}

    def local_ids(self) -> torch.Tensor:
        """The received ids as DeepEP returns them: of this rank's experts from 0, -1 for others."""
        ids = self.received.ids.to(torch.int64) - self.first_expert
        return torch.where((ids >= 0) & (ids < self.num_local_experts), ids, -1)

    def check_received(self, got: Any) -> None:
        x, scales = got if isinstance(got, tuple) else (got, None)
        op_cases.same_bits(x, self.received.tokens, "recv_x")
        if self.received.scales is not None:
            op_cases.same_bits(scales, self.received.scales, "scales")

    def biases(self, rank: int) -> dict[str, torch.Tensor]:
        """One bias in the first step and two in the others."""
        case = replace(self.case, num_biases=1 + (self.number > 0))
        return op_cases.make_biases(case, torch.bfloat16, len(self.everyone[rank].tokens), 0, self.number)

    def combined(self, rows: list[torch.Tensor], with_biases: bool = False) -> torch.Tensor:
        """What combine gives this rank for the rows that all ranks' experts return."""
        num_tokens = [inputs.tokens.shape[0] for inputs in self.everyone]
        biases = [self.biases(rank) for rank in range(self.case.world_size)] if with_biases else ()
        sums = op_cases.combine_by_nodes(rows, self.expected, num_tokens, torch.bfloat16, self.case.num_nodes, biases)
        return sums[self.context.rank]


def fp8(case: op_cases.Case) -> op_cases.Case:
    return replace(case, dtype=FP8_DTYPE, scale_dim=case.hidden_dim // 128)


def returned_rows(step: Step) -> list[torch.Tensor]:
    """What all ranks' experts return in normal mode."""
    return [
        op_cases.expert_rows(step.case, torch.bfloat16, each, r, step.number) for r, each in enumerate(step.expected)
    ]


def normal_mode(
    context: RankContext, case: op_cases.Case, with_topk: bool, asynchronous: bool, is_bounded: bool = False
) -> None:
    """DeepEP's intranode test: layout, dispatch, cached dispatch, combine with weights and bias.

    is_bounded: num_worst_tokens, so that the host gets no counts, and as many rows as could come, and one more.
    """
    buffer = make_buffer(context, case)
    most = case.world_size * case.max_tokens + 1 if is_bounded else 0
    launch: dict[str, Any] = {"config": Config(24, 8, 256), "async_finish": asynchronous}
    for number in range(len(case.tokens)):
        step = Step(case, number, context)
        if asynchronous:
            launch["previous_event"] = buffer.capture()
            hold_up(context.device)
        topk = {"topk_idx": step.topk_idx, "topk_weights": step.topk_weights} if with_topk else {}
        layout = step.layout(buffer)
        got, ids, weights, per_expert, handle, event = buffer.dispatch(
            step.x, **layout, **topk, num_worst_tokens=most, **launch
        )
        event.current_stream_wait()
        count = step.received.total_recv
        given = got if isinstance(got, tuple) else (got,)
        assert {len(each) for each in given} == {most or count}
        step.check_received(tuple(each[:count] for each in given) if case.scale_dim else got[:count])
        assert per_expert == ([] if is_bounded else step.expert_counts(context.rank))
        sent = torch.stack([each.counts_per_source for each in step.expected], 1)
        prefixes = sent.cumsum(0).to(torch.int32)
        is_in_rank, prefix = (handle[4], handle[0]) if case.num_nodes == 1 else (handle[0], handle[6])
        assert (is_in_rank is layout["is_token_in_rank"], len(handle)) == (True, 6 if case.num_nodes == 1 else 10)
        if is_bounded:
            assert prefix is None
        else:
            op_cases.same_bits(prefix, prefixes if case.num_nodes == 1 else prefixes[:, context.rank], "prefix sums")
        if with_topk:
            check_topk(step, ids[:count], weights[:count])
            assert bool((ids[count:] == -1).all())
        else:
            assert ids is None
            assert weights is None
            again, *nothing, event = buffer.dispatch(step.x, handle=handle, **launch)
            assert nothing == [None] * 4
            event.current_stream_wait()
            step.check_received(again)
        check_combine(buffer, step, handle, weights, launch, most or count)
    buffer.destroy()


def hold_up(device: torch.device) -> None:
    """On a GPU: makes a call that overtakes the current stream read zeros in place of what is computed there."""
    if device.type == "cuda":
        zeros = [torch.zeros(512, dtype=torch.uint8, device=device) for _ in range(64)]
        product = torch.ones(4096, 4096, device=device)
        for _ in range(4):
            product = product @ product
        del zeros


def check_topk(step: Step, ids: torch.Tensor, weights: torch.Tensor) -> None:
    local = step.local_ids()
    op_cases.same_bits(ids, local, "recv_topk_idx")
    op_cases.same_bits(weights, step.received.weights.masked_fill(local < 0, 0.0), "recv_topk_weights")


def check_combine(
    buffer: Buffer, step: Step, handle: Any, weights: torch.Tensor | None, launch: dict[str, Any], num_rows: int
) -> None:
    device = step.context.device
    rows = returned_rows(step)
    given = tuple(bias.to(device) for bias in step.biases(step.context.rank).values())
    own = rows[step.context.rank]
    mine = torch.full((num_rows, own.shape[1]), torch.nan, dtype=own.dtype)
    mine[: len(own)] = own
    combined, sums, event = buffer.combine(
        mine.to(device), handle, topk_weights=weights, bias=given if len(given) > 1 else given[0], **launch
    )
    event.current_stream_wait()
    op_cases.same_sums(combined, step.combined(rows, with_biases=True), "combine")
    if weights is None:
        assert sums is None
    else:
        # each slot's weight comes back from the one rank that owns its expert
        kept = step.topk_weights.cpu().masked_fill(step.topk_idx.cpu() < 0, 0.0)
        op_cases.same_bits(sums, kept, "combined_topk_weights")


# --- low latency ---


def experts_results(step: Step) -> list[torch.Tensor]:
    return [
        op_cases.expert_results(step.case, torch.bfloat16, each, r, step.number) for r, each in enumerate(step.expected)
    ]


def weighed_sum(step: Step, results: list[torch.Tensor]) -> torch.Tensor:
    rows = [reduce_experts_reference(each, r, torch.bfloat16) for each, r in zip(results, step.expected)]
    return step.combined(rows)


def check_low_latency(step: Step, got: Any, counts: torch.Tensor) -> None:
    """Every expert's rows, and their scales in DeepEP's order of memory."""
    x, scales = got if isinstance(got, tuple) else (got, None)
    config = SimpleNamespace(expert_alignment=1, column_major_scales=True)
    op: Any = SimpleNamespace(expert_recv_count=counts, config=config)
    op_cases.check_expert_rows(step.case, op, (x, None, scales), replace(step.received, weights=None))


def low_latency(context: RankContext, case: op_cases.Case, with_hook: bool, repeated: bool) -> None:
    """DeepEP's low-latency test: statistics, sources, combine from x or from the buffer; both calls may be repeated."""
    buffer = make_buffer(context, case, low_latency_mode=True)
    use_fp8 = case.quant_type != "none"
    casts = {
        "use_fp8": use_fp8,
        "round_scale": case.scale_format != "float32",
        "use_ue8m0": case.scale_format == "ue8m0",
    }
    launch = {"return_recv_hook": True} if with_hook else {"async_finish": True}
    for number in range(case.num_steps):
        step = Step(case, number, context)
        stats = torch.zeros(step.num_local_experts, dtype=torch.int32, device=context.device)
        topk_idx, topk_weights, x = step.topk_idx, step.topk_weights, step.x
        for repetition in range(1, 2 + repeated):
            got, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, topk_idx, case.max_tokens, case.num_experts, stats, **casts, **launch
            )
            finish(hook, event)
            check_low_latency(step, got, counts)
            assert stats.tolist() == [repetition * count for count in counts.tolist()]
        check_sources(case, number, context.rank, *handle[:2])
        assert tuple(handle[2:]) == (case.max_tokens, case.hidden_dim, case.num_experts)
        results = experts_results(step)
        mine = results[context.rank].to(context.device)
        for zero_copy in (False, True) if repeated else (number > 0,):
            rows = mine
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = mine
                rows = torch.full_like(mine, torch.nan)
            out = torch.empty(x.shape, dtype=torch.bfloat16, device=context.device) if zero_copy else None
            combined, event, hook = buffer.low_latency_combine(
                rows, topk_idx, topk_weights, handle, zero_copy=zero_copy, out=out, **launch
            )
            finish(hook, event)
            op_cases.same_sums(combined, weighed_sum(step, results), "low_latency_combine")
            assert out is None or combined is out
    buffer.destroy()


def finish(hook: Callable[[], None] | None, event: Any) -> None:
    if hook is None:
        event.current_stream_wait()
    else:
        hook()


# --- orders of calls, sizes, refusals ---


class Exchange:
    """A normal step between its calls; its dispatch is made."""

    def __init__(self, buffer: Buffer, step: Step) -> None:
        got, *_, handle, _ = buffer.dispatch(
            step.x, **step.layout(buffer), topk_idx=step.topk_idx, topk_weights=step.topk_weights
        )
        step.check_received(got)
        self.step, self.rows, self.handle = step, returned_rows(step), handle

    def dispatch_again(self, buffer: Buffer) -> None:
        got, *_ = buffer.dispatch(self.step.x, handle=self.handle)
        self.step.check_received(got)

    def combine(self, buffer: Buffer) -> None:
        mine = self.rows[self.step.context.rank].to(self.step.context.device)
        combined, _, _ = buffer.combine(mine, self.handle)
        op_cases.same_sums(combined, self.step.combined(self.rows), "combine")


def any_order(context: RankContext, case: op_cases.Case) -> None:
    """More open dispatches than the buffer keeps, combined in another order; then as two layers' backward does."""
    buffer = make_buffer(context, case)
    steps = [Step(case, number, context) for number in range(2)]
    opened = [Exchange(buffer, steps[number % 2]) for number in range(3)]
    for exchange in reversed(opened):
        exchange.combine(buffer)
    layers = opened[:2]
    for exchange in reversed(layers):
        exchange.dispatch_again(buffer)
        exchange.combine(buffer)
    buffer.destroy()


def growing_batches(context: RankContext, case: op_cases.Case) -> None:
    """Batches beyond what ops have been made for; and a buffer that has been told the most."""
    counts = ((2, 1), (9, 3))
    for most in (0, 4):
        buffer = make_buffer(context, case, max_num_tokens_per_rank=most)
        for number in range(2):
            step = Step(replace(case, tokens=counts), number, context)
            if most and number:
                with pytest.raises(errors.TooManyTokensError, match="max_num_tokens_per_rank"):
                    Exchange(buffer, step)
            else:
                Exchange(buffer, step).combine(buffer)
        buffer.destroy()


def hooks(context: RankContext, case: op_cases.Case) -> None:
    """Hooks that are called late, too late, or not at all, and weights that travel with the tokens."""
    buffer = make_buffer(context, case)
    steps = [Step(case, number, context) for number in (0, 1, 0)]
    sent = []
    for step in steps:
        _, _, handle, _, hook = buffer.low_latency_dispatch(
            step.x,
            step.topk_idx,
            case.max_tokens,
            case.num_experts,
            return_recv_hook=True,
            topk_weights=step.topk_weights,
        )
        sent.append((step, handle, hook))
    with pytest.raises(errors.StateError, match="before its memory is needed again"):
        sent[0][2]()
    step, handle, hook = sent[1]
    results = experts_results(step)
    mine = results[context.rank].to(context.device)
    with pytest.raises(errors.StateError, match="hook of low_latency_dispatch"):
        buffer.low_latency_combine(mine, step.topk_idx, None, handle)
    hook()
    hook()
    # weights that have travelled with the tokens come before those of combine
    others = 2 * step.topk_weights
    combined, _, late = buffer.low_latency_combine(mine, step.topk_idx, others, handle, return_recv_hook=True)
    sent[2][2]()
    # takes the memory of a combine that has not received: that one is ended first
    Exchange(buffer, Step(replace(NORMAL, hidden_dim=case.hidden_dim, num_nodes=case.num_nodes), 0, context))
    op_cases.same_sums(combined, weighed_sum(step, results), "combine whose hook has not been called")
    late()
    with pytest.raises(errors.InputError, match="topk_weights"):
        buffer.low_latency_combine(mine, step.topk_idx, None, handle)
    buffer.destroy()


def overwritten_rows(context: RankContext, case: op_cases.Case) -> None:
    """More low-latency dispatches than the buffer keeps open: the first one's combine is refused, the others' right."""
    buffer = make_buffer(context, case)
    steps = [Step(case, number, context) for number in (0, 1, 0)]

    def dispatch(step: Step) -> Any:
        return buffer.low_latency_dispatch(step.x, step.topk_idx, case.max_tokens, case.num_experts)[2]

    def combine(step: Step, handle: Any) -> None:
        results = experts_results(step)
        mine = results[context.rank].to(context.device)
        combined = buffer.low_latency_combine(mine, step.topk_idx, step.topk_weights, handle)[0]
        op_cases.same_sums(combined, weighed_sum(step, results), "combine")

    handles = [dispatch(step) for step in steps]
    for number in (1, 2):
        combine(steps[number], handles[number])
    with pytest.raises(errors.StateError, match="max_open_steps"):
        combine(steps[0], handles[0])
    # displaced by dispatches of the other mode, which have memory of their own
    handle = dispatch(steps[1])
    step = Step(replace(NORMAL, hidden_dim=case.hidden_dim, num_nodes=case.num_nodes), 0, context)
    others = [Exchange(buffer, step) for _ in range(2)]
    combine(steps[1], handle)
    for other in others:
        other.combine(buffer)
    buffer.destroy()


def what_a_communication_stream_reads(context: RankContext, case: op_cases.Case) -> None:
    """A repeated dispatch routes by the handle's ids, which the caller may drop while it runs."""
    buffer = make_buffer(context, case)
    exchange = Exchange(buffer, Step(case, 0, context))
    with mock.patch.object(buffer._stream, "run", wraps=buffer._stream.run) as run:
        exchange.combine(buffer)
        exchange.combine(buffer)
    ids = exchange.handle.ids
    assert all(any(each is ids for each in tensors_of(call.args[1])) for call in run.call_args_list)
    buffer.destroy()


def refused(wrong: list[tuple[type[Exception], str, Callable[[], Any]]]) -> None:
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()


def refusals(context: RankContext, case: op_cases.Case) -> None:
    """What is refused on the host, before anything is launched."""
    buffer = make_buffer(context, case)
    step = Step(case, 0, context)
    x, ids, weights, layout = step.x, step.topk_idx, step.topk_weights, step.layout(buffer)
    fitting = {"topk_idx": ids, "topk_weights": weights}

    def dispatch(**changes: Any) -> None:
        buffer.dispatch(**{"x": x, **layout, **fitting, **changes})

    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (errors.InputError, "or neither", lambda: dispatch(topk_weights=None)),
        (errors.InputError, "or a handle", lambda: dispatch(is_token_in_rank=None)),
        (errors.DtypeError, "is_token_in_rank", lambda: dispatch(is_token_in_rank=layout["is_token_in_rank"].int())),
        (errors.ShapeError, "is_token_in_rank", lambda: dispatch(x=x[:1])),
        (errors.ShapeError, "topk_idx", lambda: dispatch(topk_idx=ids[:1])),
        (errors.DtypeError, "weights", lambda: dispatch(topk_weights=weights.double())),
        (errors.ShapeError, "scales of shape", lambda: dispatch(x=(x.to(FP8_DTYPE), x[:, 0].float()))),
        (errors.InputError, "expert_alignment", lambda: dispatch(expert_alignment=0)),
        (errors.TooManyTokensError, "num_worst_tokens", lambda: dispatch(num_worst_tokens=case.world_size)),
        (
            errors.InputError,
            "with num_worst_tokens",
            lambda: dispatch(num_worst_tokens=64, topk_idx=None, topk_weights=None),
        ),
        (errors.InputError, "multiple of the", lambda: buffer.get_dispatch_layout(ids, 5)),
        (errors.ConfigError, "even number", lambda: Buffer.set_num_sms(7)),
    ]
    send = functools.partial(buffer.low_latency_dispatch, x, ids, 16, case.num_experts)
    too_many = functools.partial(buffer.low_latency_dispatch, x, ids, len(x) - 1, case.num_experts)
    wrong += [
        (errors.TooManyTokensError, "num_max_dispatch_tokens_per_rank", too_many),
        (errors.InputError, "both", lambda: send(async_finish=True, return_recv_hook=True)),
        (errors.InputError, "round_scale with use_ue8m0", lambda: send(use_ue8m0=True)),
        (errors.ShapeError, "multiple of 512", lambda: send(round_scale=True, use_ue8m0=True)),
        (errors.ShapeError, "recv_stats", lambda: send(ids[0])),
        (errors.DtypeError, "weights", lambda: send(topk_weights=weights.double())),
    ]
    refused(wrong)
    exchange = Exchange(buffer, step)
    rows = torch.zeros(step.received.total_recv, case.hidden_dim, dtype=torch.bfloat16, device=context.device)
    handle = exchange.handle
    wrong = [
        (errors.ShapeError, "rows received", lambda: buffer.combine(rows[1:], handle)),
        (errors.ShapeError, "bias of shape", lambda: buffer.combine(rows, handle, bias=x[1:])),
        (errors.DtypeError, "bias of dtype", lambda: buffer.combine(rows, handle, bias=x.float())),
        (errors.InputError, "or a pair", lambda: buffer.combine(rows, handle, bias=(x, x, x))),
        (errors.UnsupportedError, "columns", lambda: buffer.combine(rows, handle, topk_weights=rows)),
        (errors.ShapeError, "tokens of the handle", lambda: buffer.dispatch(x[1:], handle)),
        (errors.InputError, "with a handle", lambda: buffer.dispatch(x, handle, topk_idx=ids)),
    ]
    refused(wrong)
    exchange.combine(buffer)
    handle = send(use_fp8=False)[2]
    rows = buffer.get_next_low_latency_combine_buffer(handle)
    with mock.patch.object(WeightExchange, "run") as exchanged:
        for kind, text, wrong_rows, out in (
            (errors.DtypeError, "input of dtype", rows.float(), None),
            (errors.ShapeError, "input of shape", rows[1:], None),
            (errors.ShapeError, "out", rows, x[1:]),
        ):
            with pytest.raises(kind, match=text):
                buffer.low_latency_combine(wrong_rows, ids, weights, handle, out=out)
    exchanged.assert_not_called()
    buffer.low_latency_combine(rows, ids, weights, handle)
    buffer.clean_low_latency_buffer(16, case.hidden_dim, case.num_experts)
    buffer.destroy()
    buffer.destroy()
    for call in (dispatch, lambda: buffer.get_dispatch_layout(ids, case.num_experts)):
        with pytest.raises(errors.ClosedError, match="destroyed"):
            call()


def odd_nodes(context: RankContext, case: op_cases.Case) -> None:
    """Nodes of unequal size, on all ranks or on one, and ranks that cut other nodes: errors before a token is sent."""
    last = context.rank == case.world_size - 1
    refused(
        [
            (errors.UnsupportedError, "equally many ranks", lambda: make_buffer(context, case, gpus_per_node=3)),
            (
                errors.UnsupportedError if last else errors.ConfigMismatchError,
                "equally many ranks",
                lambda: make_buffer(context, case, gpus_per_node=3 if last else 2),
            ),
            (errors.ConfigError, "gpus_per_node to be", lambda: make_buffer(context, case, gpus_per_node=0)),
        ]
    )
    for hosts, kind, text, given in (
        ("aaab", errors.UnsupportedError, "equally many ranks", None),
        ("abab", errors.UnsupportedError, "node by node", None),
        ("aaab", errors.ConfigError, "gpus_per_node to keep each node on one host", 2),
    ):
        with on_hosts(hosts):
            refused([(kind, text, functools.partial(make_buffer, context, case, gpus_per_node=given))])
    for of_the_last in (1, 4):
        buffer = make_buffer(context, case, gpus_per_node=of_the_last if last else 2)
        step = Step(replace(case, num_nodes=case.world_size // (of_the_last if last else 2)), 0, context)
        refused([(errors.ConfigMismatchError, "on all ranks", functools.partial(Exchange, buffer, step))])
        buffer.destroy()


def weights_out_of_reach(context: RankContext, case: op_cases.Case) -> None:
    """Weights of combine are refused before anything is sent; those of dispatch reach the experts' ranks."""
    buffer, step = make_buffer(context, case), Step(case, 0, context)
    results = experts_results(step)
    mine = results[context.rank].to(context.device)
    send = functools.partial(buffer.low_latency_dispatch, step.x, step.topk_idx, case.max_tokens, case.num_experts)
    handle = send()[2]
    combine = functools.partial(buffer.low_latency_combine, mine, step.topk_idx, step.topk_weights, handle)
    refused([(errors.UnsupportedError, "topk_weights to the dispatch", combine)])
    got, counts, handle, _, hook = send(topk_weights=step.topk_weights, return_recv_hook=True)
    hook()
    check_low_latency(step, got, counts)
    combined, _, _ = buffer.low_latency_combine(mine, step.topk_idx, None, handle)
    op_cases.same_sums(combined, weighed_sum(step, results), "combine")
    buffer.destroy()
