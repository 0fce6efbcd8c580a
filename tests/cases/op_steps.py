"""Bodies of op tests about steps that overlap, are made in halves, are broken off or carry the kernels' own marks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a import errors
from ep_a2a.config import FP8_DTYPE
from ep_a2a.memory.arena import Arena
from ep_a2a.reference import combine_reference
from tests.cases.op_cases import (
    Case,
    Step,
    check_dispatched,
    make_inputs,
    make_op,
    reference_of,
    run_step,
    same_sums,
    wire_rows,
)
from tests.cases.op_checks import raised, synchronize
from tests.replay import CapturedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.ops import EpDispatchCombineOp
    from ep_a2a.testing import RankContext


def _on(context: RankContext, *tensors: torch.Tensor | None) -> list[Any]:
    return [None if t is None else t.to(context.device) for t in tensors]


def overlapping_halves(context: RankContext, case: Case) -> None:
    """Two ops: send, send, receive, receive, in dispatch and in combine; the second op may be of another kind."""
    with Arena(context.group, context.device) as arena:
        cases = (case, replace(case, seed=case.seed + 1, topk=case.topk + 1, num_steps=3))
        ops = [make_op(context, each, arena, index=index) for index, each in enumerate(cases)]
        for number in range(case.num_steps):
            everyone = [[make_inputs(each, number, r) for r in range(case.world_size)] for each in cases]
            held = []
            for each, op, inputs in zip(cases, ops, everyone):
                mine = inputs[context.rank]
                held.append(_on(context, mine.tokens, mine.weights, mine.scales, mine.ids))
                op.dispatch_send(*held[-1], max_num_tokens=each.stride(number), pad_id=each.pad_id)
            steps = []
            # the ranks need not receive in the order in which they have sent
            order = (0, 1) if (context.rank + number) % 2 else (1, 0)
            for which in order:
                each, op, inputs = cases[which], ops[which], everyone[which]
                got = op.dispatch_recv()
                counts = [one.tokens.shape[0] for one in inputs]
                reference = reference_of(each, number, inputs)
                step = Step(each, op, number, context.device, held[which][3], counts, reference, got)
                step.check_dispatched()
                steps.append(step)
            waiting = []
            for step in steps:
                rows, weights, expected, sums = step.before_combine()
                step.combine_send(rows, weights)
                waiting.append((step, expected, sums))
            for step, expected, sums in reversed(waiting):
                step.check_combined(step.op.combine_recv(), expected, sums)
        for op in ops:
            op.check()


def order_of_calls(context: RankContext, case: Case) -> None:
    """Every call at every other place than its own names the call that is next, and spoils nothing."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        mine = make_inputs(case, 0, context.rank)
        x, weights, ids = _on(context, mine.tokens, mine.weights, mine.ids)
        rows = torch.zeros(case.world_size * case.max_tokens, case.hidden_dim, dtype=op.config.combined_dtype)
        rows = rows.to(context.device)
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: op.dispatch(x, weights, None, ids),
            "dispatch_send": lambda: op.dispatch_send(x, weights, None, ids),
            "dispatch_recv": lambda: op.dispatch_recv(),
            "combine": lambda: op.combine(rows, None, ids),
            "combine_send": lambda: op.combine_send(rows, None, ids),
            "combine_recv": lambda: op.combine_recv(),
        }

        def only(next_call: str, *allowed: str) -> None:
            for name, call in calls.items():
                if name not in allowed:
                    raised(errors.AlternationError, call, f"{next_call} next", f"got {name}")

        for number in range(2):
            only("dispatch", "dispatch", "dispatch_send")
            calls["dispatch_send"]()
            only("dispatch_recv", "dispatch_recv")
            calls["dispatch_recv"]()
            only("combine", "combine", "combine_send")
            calls["combine_send"]()
            only("combine_recv", "combine_recv")
            calls["combine_recv"]()
            run_step(case, op, number, context.device)
        calls["dispatch_send"]()
        op.reset()
        only("dispatch", "dispatch", "dispatch_send")
        run_step(case, op, 2, context.device)
        calls["dispatch"]()
        calls["combine_send"]()
        op.reset()
        for number in range(3):
            run_step(case, op, number, context.device)


def graph_of_halves(context: RankContext, case: Case) -> None:
    """A captured step of four halves with work between them, replayed with changing data, mixed with eager steps."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        rank, dtype = context.rank, op.config.combined_dtype
        mine = make_inputs(case, 0, rank)
        static = _on(context, mine.tokens, mine.weights, mine.scales, mine.ids)
        between = torch.zeros(2, dtype=torch.int64, device=context.device)
        held: list[Any] = [None, None]
        rows = torch.zeros(op.num_rows(case.max_tokens), case.hidden_dim, dtype=dtype, device=context.device)

        def body(call: Callable[[Callable[[], Any]], None]) -> None:
            op.dispatch_send(*static, max_num_tokens=case.stride(0))
            call(lambda: between[0].add_(1))
            held[0] = op.dispatch_recv()
            call(lambda: rows.copy_((held[0][0].flatten(0, -2).float() * (0.5 + rank)).to(dtype)))
            op.combine_send(rows.view(*held[0][0].shape[:-1], -1), None, static[3])
            call(lambda: rows.fill_(torch.nan))
            call(lambda: between[1].add_(1))
            held[1] = op.combine_recv()

        body(lambda work: work())
        captured = CapturedStep(op, body)
        runs, number = 1 + captured.ran_at_capture, 1
        for num_replays in (1, 2, 100 if context.device.type == "cuda" else 10):
            for _ in range(num_replays):
                fresh = replace(case, seed=case.seed + number, tokens=(case.tokens[0],))
                everyone = [make_inputs(fresh, 0, r) for r in range(case.world_size)]
                new = everyone[rank]
                for target, source in zip(static, (new.tokens, new.weights, new.scales, new.ids)):
                    if target is not None:
                        target.copy_(source)
                captured.replay()
                synchronize(context)
                runs += 1
                reference = reference_of(fresh, 0, everyone)
                sent = [(r.valid_rows(r.tokens).float() * (0.5 + i)).to(dtype) for i, r in enumerate(reference)]
                sent = [wire_rows(each, case.quant_type) for each in sent]
                counts = [inputs.tokens.shape[0] for inputs in everyone]
                expected = combine_reference(sent, reference, counts, dtype)[rank]
                same_sums(held[1][0][: counts[rank]], expected, f"replay {number}")
                check_dispatched(fresh, op, held[0], reference[rank])
                arena.rendezvous.barrier("replay checked")
                number += 1
            run_step(case, op, number, context.device)
        assert between.tolist() == [runs, runs]
        op.check()


def closed_in_the_middle(context: RankContext, case: Case) -> None:
    """An op closed in the middle of a step leaves memory that no other op uses before it has been mended."""
    with Arena(context.group, context.device) as arena:
        other_case = replace(case, topk=case.topk + 1, seed=case.seed + 1)
        other = make_op(context, other_case, arena, index=0)
        apart = make_op(context, case, arena, index=1)
        breaks: tuple[Callable[[EpDispatchCombineOp], None], ...] = (
            lambda op: None,
            lambda op: op.combine_send(torch.ones(_rows_shape(op), dtype=op.config.combined_dtype, device=op.device)),
        )
        for number, break_off in enumerate(breaks):
            op = make_op(context, case, arena, index=0)
            run_step(case, op, number, context.device)
            run_step(other_case, other, number, context.device)
            Step.dispatch(case, op, number + 1, context.device)
            # combine_send has pushed rows into everyone's combine block, where nobody will fetch them
            break_off(op)
            op.close()
            for _ in range(2):
                raised(
                    errors.StateError,
                    lambda: Step.dispatch(other_case, other, 0, context.device),
                    "reset()",
                    "middle of a step",
                )
            run_step(case, apart, number, context.device)
            if number:
                other.reset()
            else:
                # the construction of an op of this index mends it, too
                make_op(context, replace(case, topk=case.topk + 2), arena, index=0).close()
            for again in range(3):
                run_step(other_case, other, again, context.device)
        # whole steps leave nothing behind
        op = make_op(context, case, arena, index=0)
        run_step(case, op, 0, context.device)
        op.close()
        run_step(other_case, other, 5, context.device)


def _rows_shape(op: EpDispatchCombineOp) -> tuple[int, ...]:
    return tuple(op._step.dispatched.tokens.shape)


def cast_by_some_ranks(context: RankContext, case: Case) -> None:
    """Tokens that come cast may hold any byte, those that dispatch casts may not: ranks must agree on who casts."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        num_scales = op.config.num_scales
        cast = replace(case, dtype=FP8_DTYPE, scale_dim=num_scales, quant_type="none", options={})
        for number in range(3):
            step = Step.dispatch(cast, op, number, context.device)
            step.check_dispatched()
            step.combine()
            run_step(case, op, number, context.device)
        mine = make_inputs(cast if context.rank == 0 else case, 3, context.rank)
        op.dispatch(*_on(context, mine.tokens, mine.weights, mine.scales, mine.ids))
        synchronize(context)
        arena.rendezvous.barrier("mismatch seen")
        raised(errors.ConfigMismatchError, op.check, "rank 0")
        op.reset()
        for number in range(3):
            run_step(case, op, number, context.device)


def cast_before(context: RankContext, case: Case) -> None:
    """Tokens come cast, in a config that could cast them: a rank without tokens moves other ranks' scales, too."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        cast = replace(case, dtype=FP8_DTYPE, scale_dim=op.config.num_scales, quant_type="none", options={})
        for number in range(case.num_steps):
            step = Step.dispatch(cast, op, number, context.device)
            step.check_dispatched()
            step.combine()


def built_under_another_default_device(context: RankContext, case: Case) -> None:
    """As engines do that build layers under "meta"."""
    with Arena(context.group, context.device) as arena:
        with torch.device("meta"):
            op = make_op(context, case, arena)
        for number in range(case.num_steps):
            run_step(case, op, number, context.device)


def error_of_fp8(context: RankContext, case: Case) -> None:
    """Results that are sent as fp8 are as near to the exact ones as MORI asks of its own: rtol 7e-2."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        for number in range(case.num_steps):
            step = Step.dispatch(case, op, number, context.device)
            generator = torch.Generator().manual_seed(number)
            # one sign per column, so that sums do not cancel, and no number that is subnormal in e4m3
            signs = torch.randint(0, 2, (case.hidden_dim,), generator=generator) * 2 - 1
            all_rows = [
                ((0.05 + 4 * torch.rand(each.total_recv, case.hidden_dim, generator=generator)) * signs).to(case.dtype)
                for each in step.reference
            ]
            shape = (*step.got[0].shape[:-1], case.hidden_dim)
            rows = torch.full(shape, torch.nan, dtype=case.dtype)
            start = 0
            for source, count in enumerate(step.reference[context.rank].counts_per_source.tolist()):
                target = step.reference[context.rank].rows_of_source(rows, source)
                target.copy_(all_rows[context.rank][start : start + count])
                start += count
            result, _ = op.combine(rows.to(context.device), None, step.ids)
            exact = combine_reference(all_rows, step.reference, step.counts, torch.float32)[context.rank]
            got = result[: len(exact)].cpu().float()
            # nothing that is sent as fp8 is exact: a wire that is not quantised would be another bug
            routed = exact.abs().amax(1) > 0
            assert bool((got - exact).abs().amax(1)[routed].gt(0).all())
            torch.testing.assert_close(got, exact, rtol=7e-2, atol=0.0)


EIGHT = {"world_size": 2, "num_experts": 6}
STEP_BODIES: dict[str, tuple[Callable[..., None], Case]] = {
    "overlapping-halves": (
        overlapping_halves,
        Case(tokens=((16, 9, 0), (0, 3, 16)), world_size=3, num_experts=7, num_steps=4, layout="rank_major"),
    ),
    "overlapping-halves-unusual": (overlapping_halves, Case(tokens=((16, 9),), num_steps=4, unusual=True, **EIGHT)),
    "overlapping-halves-direct": (
        overlapping_halves,
        Case(tokens=((16, 9),), num_steps=4, layout="rank_major", options={"flagged_max_tokens": 0}, **EIGHT),
    ),
    "order-of-calls": (order_of_calls, Case(tokens=((9, 16),), **EIGHT)),
    "order-of-calls-direct": (order_of_calls, Case(tokens=((9, 16),), options={"flagged_max_tokens": 0}, **EIGHT)),
    "graph-of-halves": (graph_of_halves, Case(tokens=((16, 9),), **EIGHT)),
    "graph-of-halves-direct": (
        graph_of_halves,
        Case(tokens=((16, 0),), layout="rank_major", options={"flagged_max_tokens": 0}, **EIGHT),
    ),
    "graph-of-halves-quantised": (
        graph_of_halves,
        Case(tokens=((5, 9),), quant_type="fp8_blockwise", hidden_dim=256, unusual=True, **EIGHT),
    ),
    "closed-in-the-middle": (closed_in_the_middle, Case(tokens=((16, 9),), **EIGHT)),
    "closed-in-the-middle-direct": (
        closed_in_the_middle,
        Case(tokens=((16, 9),), layout="rank_major", options={"flagged_max_tokens": 0}, **EIGHT),
    ),
    "cast-by-some-ranks": (
        cast_by_some_ranks,
        Case(tokens=((16, 9),), quant_type="fp8_per_1x128", hidden_dim=256, unusual=True, **EIGHT),
    ),
    "cast-by-some-ranks-direct": (
        cast_by_some_ranks,
        Case(tokens=((16, 9),), quant_type="fp8_per_token", options={"flagged_max_tokens": 0}, unusual=True, **EIGHT),
    ),
    **{
        f"cast-before-{layout}": (
            cast_before,
            Case(
                world_size=2,
                tokens=((16, 0), (0, 9)),
                num_experts=5,
                quant_type="fp8_per_1x128",
                hidden_dim=256,
                layout=layout,
                num_steps=4,
            ),
        )
        for layout in ("compact", "rank_major", "expert_major")
    },
    "cast-before-direct": (
        cast_before,
        Case(
            world_size=2,
            tokens=((16, 0), (0, 9)),
            num_experts=5,
            quant_type="fp8_per_token",
            num_steps=4,
            options={"flagged_max_tokens": 0},
        ),
    ),
    "error-of-fp8-blockwise": (error_of_fp8, Case(quant_type="fp8_blockwise", hidden_dim=1152, topk=4, **EIGHT)),
    "error-of-fp8-direct-cast": (
        error_of_fp8,
        Case(quant_type="fp8_direct_cast", hidden_dim=256, topk=4, dtype=torch.float32, layout="rank_major", **EIGHT),
    ),
}
