"""Bodies of op tests that are more than steps against the oracle: time, graphs, memory, failures. Run on every rank."""

import contextlib
import functools
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ep_a2a import clock, errors
from ep_a2a.config import EpDispatchCombineKernelType
from ep_a2a.kernels.layout import Record, Region
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.policy import MAX_COUNTED_ALONE
from ep_a2a.reference import DispatchReference, reduce_experts_reference
from ep_a2a.testing import RankContext
from tests.cases import op_cases
from tests.cases.call_orders import run_order
from tests.cases.op_checks import (
    ABSENT_TIMEOUT_SECS,
    BRIEF_TIMEOUT_SECS,
    ENOUGH_SECS,
    SHORT_TIMEOUT_SECS,
    raised,
    refused,
    synchronize,
)
from tests.cases.op_steps import STEP_BODIES
from tests.late import come_last
from tests.replay import CapturedStep


def late_rank(context: RankContext, case: op_cases.Case) -> None:
    with op_cases.built_op(context, case) as op:
        for number in range(3):
            if number == 1:
                come_last(context, 1, "dispatch")
            step = op_cases.Step.dispatch(case, op, number, context.device)
            step.check_dispatched()
            if number == 2:
                come_last(context, case.world_size - 1, "combine")
            step.combine()


def sequential_ops_share_memory(context: RankContext, case: op_cases.Case) -> None:
    """Ops of one index share their large blocks; an op of the same config gets the same addresses again."""
    with op_cases.arena_of(context, case) as arena:
        first = op_cases.make_op(context, case, arena, index=0)
        small_case = replace(case, topk=case.topk + 1, hidden_dim=case.hidden_dim // 2)
        smaller = op_cases.make_op(context, small_case, arena, index=0)
        tokens, result = Region.TOKENS, Region.RESULT
        assert first.memory.view(tokens).data_ptr() == smaller.memory.view(tokens).data_ptr()
        assert first.memory.view(result).data_ptr() == smaller.memory.view(result).data_ptr()
        for number in range(3):
            op_cases.run_step(case, first, number, context.device)
            op_cases.run_step(small_case, smaller, number, context.device)
        table, num_bytes = first.memory.table, arena.num_bytes
        addresses = table[: len(Region) * case.world_size].clone()
        del first
        gc.collect()
        again = op_cases.make_op(context, case, arena, index=0)
        assert again.memory.table.data_ptr() == table.data_ptr()
        assert torch.equal(again.memory.table[: addresses.numel()], addresses)
        assert arena.num_bytes == num_bytes
        op_cases.run_step(case, again, 3, context.device)
        for number in range(2):
            with op_cases.make_op(context, case, arena) as unnamed:
                op_cases.run_step(case, unnamed, number, context.device)
            # those without an index have memory of their own, which the next one gets
            num_bytes = arena.num_bytes if number == 0 else num_bytes
        assert arena.num_bytes == num_bytes
    arena.close()
    raised(errors.ClosedError, lambda: again.check())


def nothing_waits_for_garbage_collection(context: RankContext, case: op_cases.Case) -> None:
    """Symmetric memory must not be freed when garbage is collected: that may be while a graph is being captured."""
    gc.disable()
    try:
        arena = Arena(context.group, context.device)
        op = op_cases.make_op(context, case, arena)
        op_cases.run_step(case, op, 0, context.device)
        blocks = [weakref.ref(each.local) for each in op.memory.acquired.symmetric.values()]
        op.close()
        arena.close()
        del op, arena
        assert [block() for block in blocks] == [None] * len(blocks)
    finally:
        gc.enable()


def graph(context: RankContext, case: op_cases.Case) -> None:
    """A captured step, replayed with changing data, mixed with eager steps; every replay against the oracle.

    With case.split "all" the step is four halves, between which the graph has other work.
    """
    with op_cases.built_op(context, case) as op:
        device, rank, halves = context.device, context.rank, case.split == "all"
        mine = op_cases.make_inputs(case, 0, rank)
        static = mine.on(device)
        dtype = op.config.combined_dtype
        held: list[Any] = [None, None]
        all_rows = op.get_registered_combine_input_buffer(dtype)
        between = torch.zeros(2, dtype=torch.int64, device=device)

        def body(call: Callable[[Callable[[], Any]], None]) -> None:
            begin = op.dispatch_send if halves else op.dispatch
            held[0] = begin(*static, step_tokens=case.stride(0))
            call(lambda: between[0].add_(1))
            if halves:
                held[0] = op.dispatch_recv()
            rows = all_rows[: held[0][0].numel() // case.hidden_dim]
            call(lambda: rows.copy_((held[0][0].flatten(0, -2).float() * (0.5 + rank)).to(dtype)))
            held[1] = (op.combine_send if halves else op.combine)(rows, None, static[3])
            call(lambda: rows.fill_(torch.nan))
            call(lambda: between[1].add_(1))
            if halves:
                held[1] = op.combine_recv()

        body(lambda work: work())
        captured = CapturedStep(op, body)
        runs, number = 1 + captured.ran_at_capture, 1
        for num_replays in (1, 2, 100 if device.type == "cuda" else 3):
            for _ in range(num_replays):
                # the tensors that the capture reads keep their shapes, so every step has step 0's token counts
                fresh = replace(case, seed=case.seed + number, tokens=(case.tokens[0],))
                everyone = [op_cases.make_inputs(fresh, 0, r) for r in range(case.world_size)]
                for target, source in zip(static, everyone[rank].on(device)):
                    if target is not None:
                        target.copy_(source)
                captured.replay()
                synchronize(context)
                reference = op_cases.reference_of(fresh, 0, everyone)
                rows = [
                    op_cases.wire_rows(_results(r, 0.5 + i, dtype), case.quant_type) for i, r in enumerate(reference)
                ]
                counts = [inputs.tokens.shape[0] for inputs in everyone]
                expected = op_cases.combine_by_nodes(rows, reference, counts, dtype, case.num_nodes)[rank]
                op_cases.same_sums(held[1][0][: counts[rank]], expected, f"replay {number}")
                op_cases.check_dispatched(fresh, op, held[0], reference[rank])
                # past its combine a rank's rows belong to the next step of whichever peer is fastest
                op.arena.rendezvous.barrier("replay checked")
                number += 1
            op_cases.run_step(replace(case, split=""), op, number, device)
        assert between.tolist() == [runs + number - 1] * 2
        op.check()


def _results(reference: DispatchReference, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """What a rank's combine sends when its experts multiply their rows by a factor."""
    if reference.expert_counts is not None:
        return reduce_experts_reference((reference.tokens.float() * factor).to(dtype), reference, dtype)
    return (reference.valid_rows(reference.tokens).float() * factor).to(dtype)


def missing_rank(context: RankContext, case: op_cases.Case, phase: str) -> None:
    """The last rank skips a phase: all others get a RankTimeoutError that calls it late; reset makes the op usable."""
    absent = case.world_size - 1
    with op_cases.built_op(context, case) as op:
        op_cases.run_step(case, op, 0, context.device)
        op.set_timeout(ABSENT_TIMEOUT_SECS)
        if phase == "combine":
            step = op_cases.Step.dispatch(case, op, 1, context.device)

        def call() -> torch.Tensor:
            if phase == "combine":
                rows = op.get_registered_combine_input_buffer(op.config.combined_dtype)
                return op.combine(rows, None, step.ids)[0][: step.counts[context.rank]]
            x, _, _, ids = op_cases.make_inputs(case, 1, context.rank).on(context.device)
            return op.dispatch(x, None, None, ids).total_recv

        # a slow machine may take longer over the checks of one rank than the others are going to wait
        op.arena.rendezvous.barrier("before one is missing")
        got = call() if context.rank != absent else None
        synchronize(context)
        op.arena.rendezvous.barrier("all have given up")
        # the absent rank is told by the others: its own next kernel would have to leave at once
        got = call() if got is None else got
        synchronize(context)
        # on a GPU programs whose tokens the absent rank has no part in have added them already
        if phase == "dispatch" or context.rank == absent or context.device.type == "cpu":
            assert not got.any()
        if phase == "dispatch":
            assert not op.recv_counts.any()
        error = raised(errors.RankTimeoutError, op.check, f"rank {absent}", f"timeout_secs = {ABSENT_TIMEOUT_SECS:g}")
        assert (error.missing_ranks, error.late_ranks) == ((), (absent,))
        assert error.wanted == 2
        assert [epochs[absent] for epochs in error.seen.values()] == [1] * (2 if phase == "dispatch" else 1), error
        # dispatch tells counts before it tells anything else
        first = next(iter(error.seen.values()))
        assert first == tuple(1 if r == absent else 2 for r in range(case.world_size)), error
        raised(errors.RankTimeoutError, lambda: op_cases.run_step(case, op, 2, context.device))
        op.reset()
        op.set_timeout(ENOUGH_SECS)
        for number in range(3, 6):
            op_cases.run_step(case, op, number, context.device)


def late_in_the_first_step(context: RankContext, case: op_cases.Case) -> None:
    """The last rank comes late: nobody minds in the op's first step, and all others do in the second."""
    last = case.world_size - 1
    with op_cases.arena_of(context, case) as arena:
        op = op_cases.make_op(context, case, arena, timeout_secs=BRIEF_TIMEOUT_SECS, first_timeout_secs=60.0)
        arena.rendezvous.barrier("before one is late")
        if context.rank == last:
            clock.sleep(2 * BRIEF_TIMEOUT_SECS)
        op_cases.run_step(case, op, 0, context.device)
        arena.rendezvous.barrier("before one stays away")
        if context.rank != last:
            x, _, _, ids = op_cases.make_inputs(case, 1, context.rank).on(context.device)
            # an exchange between nodes raises at once
            with contextlib.suppress(errors.RankTimeoutError) if op.config.is_staged else contextlib.nullcontext():
                op.dispatch(x, None, None, ids)
            synchronize(context)
            bound = "" if op.config.is_staged else f" timeout_secs = {BRIEF_TIMEOUT_SECS:g}"
            raised(errors.RankTimeoutError, op.check, f"rank {last}", bound)
        arena.rendezvous.barrier("the others have given up")
        op.reset()
        op.set_timeout(ENOUGH_SECS)
        op_cases.run_step(case, op, 2, context.device)


def dropped_in_a_step(context: RankContext, case: op_cases.Case) -> None:
    """One rank forgets its op after a dispatch, the other's combine sends to it: the next op there begins clean."""
    with op_cases.arena_of(context, case) as arena:
        op = op_cases.make_op(context, case, arena, index=0, timeout_secs=ENOUGH_SECS)
        step = op_cases.Step.dispatch(case, op, 0, context.device)
        if context.rank == 1:
            del step, op
        else:
            op.set_timeout(BRIEF_TIMEOUT_SECS)
            op.combine(op.get_registered_combine_input_buffer(op.config.combined_dtype).fill_(3.0), None, None)
            synchronize(context)
            raised(errors.RankTimeoutError, op.check, "rank 1")
            op.close()
        arena.rendezvous.barrier("nothing runs any more")
        again = op_cases.make_op(context, case, arena, index=0)
        for number in range(2):
            op_cases.run_step(case, again, number, context.device)


def is_recorded(
    context: RankContext, case: op_cases.Case, op: EpDispatchCombineOp, kind: type[errors.EpA2AError], *words: str
) -> None:
    """Looks for a failure on all ranks, which is over after reset."""
    synchronize(context)
    op.arena.rendezvous.barrier("failure seen")
    raised(kind, op.check, *words)
    if kind is errors.ConfigMismatchError and not op.config.is_staged:
        # as if another rank's finding had come first
        op.memory.record_words[Record.DETAIL] = 0
        raised(kind, op.check, *words)
    op.reset()
    op_cases.run_step(case, op, 1, context.device)


def device_failures(context: RankContext, case: op_cases.Case) -> None:
    """What only the device can know: recorded, raised at the next call, and over after reset."""
    with op_cases.arena_of(context, case) as arena:
        op = op_cases.make_op(context, case, arena, timeout_secs=SHORT_TIMEOUT_SECS)
        tokens, _, _, ids = op_cases.make_inputs(case, 0, context.rank).on(context.device)
        weights = torch.ones(ids.shape, device=context.device)
        expect = functools.partial(is_recorded, context, case, op)
        op.dispatch(tokens, None, None, ids, step_tokens=case.max_tokens - (context.rank == 0))
        expect(errors.ConfigMismatchError, f"step_tokens {case.max_tokens - 1}")
        op.dispatch(tokens, weights if context.rank else None, None, ids)
        expect(errors.ConfigMismatchError, "no weights")
        op.dispatch(tokens, None, None, ids, tag=5 + context.rank)
        expect(errors.ConfigMismatchError, "rank 0: tag 5, rank 1: tag 6")
        op.dispatch(tokens, None, None, ids)
        foreign = torch.where(ids == ids[0, 0], ids + 1, ids)
        op.combine(op.get_registered_combine_input_buffer(op.config.combined_dtype), None, foreign)
        expect(errors.ForeignIndicesError, "indices")
        step = CapturedStep(op, lambda call: op.dispatch(tokens, None, None, ids))
        for _ in range(1 if step.ran_at_capture else 2):
            step.replay()
        expect(errors.AlternationError, "graph")


OF_ONE_CHECKSUM = ([1, 2, 3, 8, 7, 6], [1, 67, 32, 4, 5, 68])
"""Bounds that ops/bounds.py gives the same checksum: their sums differ."""


def bounds_that_differ(context: RankContext, case: op_cases.Case) -> None:
    """One rank was given another list than the others: it finds out, and tells the others by their next kernel."""
    with op_cases.arena_of(context, case) as arena:
        op = op_cases.make_op(context, case, arena, timeout_secs=SHORT_TIMEOUT_SECS)
        tokens, _, _, ids = op_cases.make_inputs(case, 0, context.rank).on(context.device)
        rows = op.get_registered_combine_input_buffer(op.config.combined_dtype)
        bounds = [case.max_tokens - rank for rank in range(case.world_size)]
        # the first row of rank 0 and the sum are those of the others' list
        swapped = bounds[:1] + bounds[:0:-1]
        other = [*bounds[:-1], case.max_tokens]
        # with a bound of M - 1 on low-latency steps, ranks take different kernels
        rising = bounds[::-1]
        pairs = [(swapped, bounds), (other, bounds), (bounds, other), (bounds, case.max_tokens)]
        pairs.append((rising, [rising[0], *(bound - 1 for bound in rising[1:])]))
        if case.world_size == len(OF_ONE_CHECKSUM[0]):
            pairs.append(OF_ONE_CHECKSUM)
        # two ranks have nothing to swap behind rank 0
        for ours, theirs in pairs[case.world_size == 2 :]:
            op.dispatch(tokens, None, None, ids, step_tokens=theirs if context.rank else ours)
            synchronize(context)
            arena.rendezvous.barrier("failure told")

            def go_on() -> None:
                op.combine(rows, None, ids)
                synchronize(context)
                op.check()

            raised(errors.ConfigMismatchError, go_on)
            op.reset()
            op_cases.run_step(case, op, 1, context.device)


def graphs_of_other_steps(context: RankContext, case: op_cases.Case) -> None:
    """A combine graph of another step_tokens than the dispatch graph before it: other rows, which lie elsewhere."""
    with op_cases.built_op(context, case) as op:
        tokens, weights, _, ids = op_cases.make_inputs(case, 0, context.rank).on(context.device)
        most_rows = op.get_registered_combine_input_buffer(op.config.combined_dtype)
        dispatches, combines = [], []
        for most in (case.stride(0) or max(case.tokens[0]), case.max_tokens):

            def dispatch(_: Any, most: int | Sequence[int] = most) -> None:
                op.dispatch(tokens, weights, None, ids, step_tokens=most)

            op_cases.run_step(case, op, 0, context.device)
            dispatches.append(CapturedStep(op, dispatch))
            combines.append(CapturedStep(op, lambda _: op.combine(rows_of_step(op, most_rows), None, ids)))
            op.arena.rendezvous.barrier("captured")
        for dispatched, combined in ((0, 1), (1, 0)):
            dispatches[dispatched].replay()
            combines[combined].replay()
            is_recorded(context, case, op, errors.AlternationError, "step_tokens")


def rows_of_step(op: EpDispatchCombineOp, rows: torch.Tensor) -> torch.Tensor:
    """Rows of their own, as many as the combine of the op's open dispatch takes."""
    assert op.open_step is not None
    return rows[: math.prod(op.open_step.lead)].clone()


def memory_that_peers_overwrite(context: RankContext, case: op_cases.Case) -> None:
    """What dispatch returned holds the next step's rows once a peer has gone on: it is copied, or refused."""
    with op_cases.built_op(context, case) as op:
        num_tokens = case.tokens[0][context.rank]
        x = torch.full((num_tokens, case.hidden_dim), 1.0 + context.rank, device=context.device).to(op.config.data_type)
        # each token goes to all ranks
        ids = torch.arange(case.topk, dtype=torch.int32, device=context.device).repeat(num_tokens, 1)
        received = op.dispatch(x, None, None, ids).tokens
        rows, inside = torch.ones_like(received), received[0, :num_tokens]
        raised(errors.InputError, lambda: op.combine(rows, None, None, out=inside), "out outside of what dispatch")
        out = op.combine_send(rows, None, None, bias_0=inside, bias_1=x)[0]
        synchronize(context)
        op.arena.rendezvous.barrier("sent")
        inside.fill_(77.0)
        op.combine_recv()
        expected = torch.full(x.shape, case.world_size + 1.0 + (1.0 + context.rank), dtype=x.dtype)
        op_cases.same_bits(out[:num_tokens], expected, "sums and biases")
        raised(errors.InputError, lambda: op.dispatch(inside, None, None, ids), "input outside of what dispatch")
        op.dispatch(x, None, None, ids)
        op.combine(rows, None, None)
        op.check()
        for wrong in (-1, 2.5, True):
            raised(errors.ConfigError, lambda wrong=wrong: op.set_max_sms(wrong), "max_sms")
        op.set_max_sms(0, shares_sm=True)
        op.dispatch(x, None, None, ids)
        result = op.combine(rows, None, None)[0][:num_tokens]
        expected = torch.full(result.shape, float(case.world_size), dtype=result.dtype)
        op_cases.same_bits(result, expected, "sums by programs beside products")
        op.check()


def cap_overflow(context: RankContext, case: op_cases.Case) -> None:
    """One row more than fits is an error on all ranks; as many rows as fit are right."""
    # the cap is a multiple of the ranks, of which one alone brings a token more
    cap, tokens = 2 * case.world_size, ((3, *[2] * (case.world_size - 1)), (2,))
    case = replace(case, routing="all_to_one", tokens=tokens)
    with op_cases.arena_of(context, case) as arena:
        op = op_cases.make_op(context, case, arena, max_total_recv_tokens=cap)
        x, _, _, ids = op_cases.make_inputs(case, 0, context.rank).on(context.device)
        op.dispatch(x, None, None, ids)
        synchronize(context)
        arena.rendezvous.barrier("overflow seen")
        if context.rank:
            # the others learn it while they receive, or from their poisoned next step
            with contextlib.suppress(errors.CapacityError):
                op.combine(op.get_registered_combine_input_buffer(op.config.combined_dtype), None, None)
        is_recorded(context, case, op, errors.CapacityError, "rank 0", "max_total_recv_tokens")


def host_checks(context: RankContext, case: op_cases.Case) -> None:
    """Every mistake that the host can see, each with its own class, raised before anything is launched."""
    device, rank = context.device, context.rank
    with op_cases.built_op(context, case) as op:
        x, _, _, ids = op_cases.make_inputs(case, 0, rank).on(device)
        weights = torch.ones(ids.shape, device=device)
        hidden, topk, most = case.hidden_dim, case.topk, case.max_tokens
        num_rows = case.world_size * most

        def is_refused(kind: type[errors.EpA2AError], work: Callable[[], Any], *words: str) -> None:
            refused(op, kind, work, *words)

        def dispatch(**changes: Any) -> Callable[[], Any]:
            keys = {"input": x, "weights": weights, "scales": None, "indices": ids}
            return lambda: op.dispatch(**{**keys, **changes})

        wide = torch.zeros(len(x), 2 * hidden, dtype=x.dtype, device=device)
        shifted = torch.zeros(x.numel() + 1, dtype=x.dtype, device=device)[1:].view(x.shape)
        is_refused(errors.AlternationError, lambda: op.combine(x, None, ids), "dispatch")
        is_refused(errors.DtypeError, dispatch(input=x.float()), "bfloat16")
        is_refused(errors.DtypeError, dispatch(indices=ids.long()), "int32")
        is_refused(errors.DtypeError, dispatch(weights=weights.half()), "float32")
        is_refused(errors.DtypeError, dispatch(input=[1]), "tensor")
        is_refused(errors.DeviceError, dispatch(input=x.to("meta")), "meta")
        is_refused(errors.ContiguityError, dispatch(input=wide[:, :hidden]), "contiguous")
        is_refused(errors.ContiguityError, dispatch(input=shifted), "16")
        is_refused(errors.HiddenSizeError, dispatch(input=wide), str(hidden))
        is_refused(errors.ShapeError, dispatch(input=x.view(-1)), "2 dimensions")
        is_refused(errors.TopKError, dispatch(indices=torch.zeros(len(x), topk + 1, dtype=torch.int32, device=device)))
        is_refused(errors.ShapeError, dispatch(indices=ids[:-1]))
        is_refused(errors.ShapeError, dispatch(weights=weights[:-1]))
        is_refused(errors.InputError, dispatch(scales=torch.ones(len(x), 1, device=device)), "scale")
        many = torch.zeros(most + 1, hidden, dtype=x.dtype, device=device)
        is_refused(errors.TooManyTokensError, dispatch(input=many), str(most))
        is_refused(errors.TooManyTokensError, dispatch(step_tokens=most + 1))
        is_refused(errors.InputError, dispatch(step_tokens=0), "at least 1")
        is_refused(errors.TooManyTokensError, dispatch(step_tokens=len(x) - 1))
        is_refused(errors.TooManyTokensError, dispatch(step_tokens=[len(x) - 1] * case.world_size))
        is_refused(errors.TooManyTokensError, dispatch(step_tokens=[len(x)] * (case.world_size - 1) + [most + 1]))
        for name, values in {
            "pad_id": (1 << 40, 1.5, None),
            "tag": (-1, 1.5, True, None),
            "step_tokens": (7.0, True, "7", [most], [most, 1.0], [most, -1], torch.tensor([most, most])),
            "block_num": (2.5, 1 << 40),
        }.items():
            for value in values:
                is_refused(errors.InputError, dispatch(**{name: value}), name)
        scaled = op_cases.make_op(context, case, op.arena, scale_dim=2, scale_type_size=4)
        raised(errors.ShapeError, lambda: scaled.dispatch(x, None, torch.empty(0, device=device), ids), "scales")
        scaled.close()
        op_cases.run_step(case, op, 0, device)
        # equal to what the step has had
        for name, value in {"step_tokens": float(most), "pad_id": float(case.pad_id)}.items():
            is_refused(errors.InputError, dispatch(**{name: value}), name)

        step = op_cases.Step.dispatch(case, op, 1, device)
        rows = torch.zeros(num_rows, hidden, dtype=op.config.combined_dtype, device=device)
        is_refused(errors.AlternationError, dispatch(), "combine")
        is_refused(errors.DtypeError, lambda: op.combine(rows.double(), None, None))
        is_refused(errors.ShapeError, lambda: op.combine(rows[:-1], None, None), "total_recv")
        is_refused(errors.HiddenSizeError, lambda: op.combine(rows.view(-1, hidden // 2), None, None))
        is_refused(errors.ShapeError, lambda: op.combine(rows, weights, None), "dispatch returned")
        is_refused(errors.ForeignIndicesError, lambda: op.combine(rows, None, step.got[3]), "topk_ids")
        is_refused(errors.DtypeError, lambda: op.combine(rows, [1], None), "tensor")
        is_refused(errors.InputError, lambda: op.combine(rows, None, None, block_num=1 << 40), "block_num")
        is_refused(errors.ShapeError, lambda: op.combine(rows.view(2, -1, hidden), None, None), "shape")
        buffer = op.get_registered_combine_input_buffer(op.config.combined_dtype)
        own_rows = buffer[: len(x)]
        is_refused(errors.InputError, lambda: op.combine(buffer[: len(rows)], None, None, out=own_rows), "overlap")
        is_refused(errors.ShapeError, lambda: op.combine(rows, None, None, out=torch.empty_like(rows)), "out")
        pool = torch.zeros(4 * rows.numel(), dtype=torch.float32, device=device)
        sums = pool.view(rows.dtype)[: x.numel() + hidden].view(-1, hidden)
        for bias in ("bias_0", "bias_1"):
            for out, shifted in ((sums[1:], sums[:-1]), (sums[:-1], sums[1:])):
                combine = functools.partial(op.combine, rows, None, None, out=out, **{bias: shifted})
                is_refused(errors.InputError, combine, f"out and {bias} to be the same memory or apart; got a partial")
        summed = pool[topk : topk + num_rows * topk].view(num_rows, topk)
        is_refused(errors.InputError, lambda: op.combine(rows, summed, None, out=sums[:-1]), "the weights to be summed")
        step.combine()

        rows = op.dispatch(x, None, None, ids)[0].zero_()
        bias = torch.ones_like(x)
        assert op.combine(rows, None, None, out=bias, bias_0=bias)[0].unique().tolist() == [1.0]
        op.close()
        op.close()
        raised(errors.ClosedError, dispatch(), "closed")


def other_arrangements(context: RankContext, case: op_cases.Case) -> None:
    """Rows of another arrangement than dispatch's are refused, also where their number is right."""
    with op_cases.built_op(context, case) as op:
        x, _, _, ids = op_cases.make_inputs(case, 0, context.rank).on(context.device)
        if case.layout == "expert_major":
            raised(errors.InputError, lambda: op.dispatch(x, None, None, ids), "weights", "expert_major")
        step = op_cases.Step.dispatch(case, op, 0, context.device)
        rows = torch.zeros(*step.got[0].shape, dtype=op.config.combined_dtype, device=context.device)
        if case.layout == "expert_major":
            raised(errors.InputError, lambda: op.combine(rows, step.got[1], None), "weights")
        else:
            whole = rows.new_zeros(case.world_size, case.max_tokens, case.hidden_dim)
            raised(errors.ShapeError, lambda: op.combine(whole, None, None), "input of shape")
        raised(errors.ShapeError, lambda: op.combine(rows.transpose(0, 1).contiguous(), None, None), "input of shape")
        step.combine()


def weights_on_some_ranks(context: RankContext, case: op_cases.Case) -> None:
    """A rank that sums weights finds out that another rank brought none."""
    with op_cases.built_op(context, case) as op:
        step = op_cases.Step.dispatch(case, op, 0, context.device)
        rows = op.get_registered_combine_input_buffer(op.config.combined_dtype)
        op.combine(rows, step.got[1] if context.rank == 0 else None, None)
        synchronize(context)
        op.arena.rendezvous.barrier("combined")
        # over torch.distributed another node hears of it by an exchange only, and rank 0 makes none
        hears = context.rank == 0 or not op.config.is_staged
        if context.rank and hears:
            # those that have not been told in combine are told by their next kernel
            with contextlib.suppress(errors.ConfigMismatchError):
                op_cases.Step.dispatch(case, op, 1, context.device)
            synchronize(context)
        without = list(range(1, context.world_size))
        if hears:
            # a rank without weights may be told by rank 0 before it has looked itself
            named = f"ranks {without}" if context.rank == 0 else ""
            raised(errors.ConfigMismatchError, op.check, "weights on all ranks", f"none on {named}")
        op.arena.rendezvous.barrier("seen")
        op.reset()
        op_cases.run_step(case, op, 1, context.device)


def construction_mismatches(context: RankContext, case: op_cases.Case) -> None:
    """Ranks that build different ops, or do not come, are found at construction, with field and ranks named."""
    with op_cases.arena_of(context, case) as arena:
        changes: dict[str, Any] = {"hidden_dim": case.hidden_dim * 2} if context.rank == 1 else {}
        raised(
            errors.ConfigMismatchError, lambda: op_cases.make_op(context, case, arena, **changes), "hidden_dim", "[1]"
        )
        other_rank = {"rank": (context.rank + 1) % case.world_size}
        raised(errors.ConfigError, lambda: op_cases.make_op(context, case, arena, **other_rank))
        raised(
            errors.ConfigError,
            lambda: op_cases.make_op(context, case, arena, quant_type="fp8_blockwise", hidden_dim=64),
        )
        # what only one rank sees reaches the others at once, and the ranks stay in step
        alone = {"kernel_type": EpDispatchCombineKernelType.IntraNodeLL} if context.rank == 1 else {}
        kind = errors.UnsupportedError if context.rank == 1 else errors.ConfigMismatchError
        raised(kind, lambda: op_cases.make_op(context, case, arena, **alone), "IntraNodeLL")
        op_cases.run_step(case, op_cases.make_op(context, case, arena), 0, context.device)
        arena.rendezvous.timeout_secs = 2.0
        if context.rank != 1:
            error = raised(errors.RankTimeoutError, lambda: op_cases.make_op(context, case, arena), "rank 1")
            # its process runs
            assert (error.missing_ranks, error.late_ranks) == ((), (1,))
        come_last(context, 1, "the end")


interleaved = functools.partial(run_order, order="interleaved")
order_of_calls = functools.partial(run_order, order="of-calls")
overlapping_halves = functools.partial(run_order, order="overlapping-halves")
closed_in_the_middle = functools.partial(run_order, order="closed-in-the-middle")
BODIES = {
    **op_cases.read_bodies("op_special", globals()),
    # programs that fail have told their counts to those behind them
    "device-failures-look-back": (
        device_failures,
        op_cases.Case(world_size=2, tokens=((9,),), hidden_dim=8, max_tokens=MAX_COUNTED_ALONE + 1),
    ),
    **STEP_BODIES,
}
BY_THE_SIMULATED_CLOCK = (late_in_the_first_step,)
"""Bodies that let time pass, for which only the simulator has a clock."""
