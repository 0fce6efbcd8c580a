"""Ranks that leave the order of calls: who is named, by a clock that only the simulator moves."""

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_a2a import clock
from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory import arena as arena_module
from ep_a2a.memory.agreement import PATIENCE_SECS
from ep_a2a.memory.arena import CLOSE_PATIENCE_SECS, Arena, BlockSizes
from ep_a2a.ops import EpDispatchCombineOp
from tests.cases import fault_cases
from tests.cases.fault_cases import VICTIM, close_secs, echo_of, settle, steps_until_error, told_by
from tests.cases.op_cases import Case, Step, make_inputs, make_op, run_case, run_step, same_bits
from tests.cases.op_checks import raised
from tests.cases.outside_fault_cases import BULK, LOW_LATENCY, case_of
from tests.cases.staged_cases import over_torch_distributed
from tests.messages import messages_of
from tests.simulator.explain import describe
from tests.simulator.faults import simulation_of
from tests.simulator.nodes import arena_of
from tests.simulator.ranks import Conditions, Context

TIMEOUT_SECS = 4.0
MOST_SECS, LATE_SECS = 25.0, 60.0
"""MOST_SECS: a wait ends at its third look at the clock, which comes every 32 polls of up to 0.2 s each here."""
SIZES = BlockSizes(512, {"dispatch": 1024}, 64, {"result": 128}, record_words=8)
TWO = Case(world_size=2, hidden_dim=32, tokens=((3, 2),), max_tokens=5)


def results_of(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    simulation = simulation_of(world_size, Conditions(num_sms=4))
    outcome = simulation.run(body, *args)
    assert outcome.errors == [None] * world_size, f"{outcome.errors}\n{describe(simulation)}"
    return outcome.results


def late_before(context: Context, case: Case, call: str) -> dict[str, Any]:
    """A rank comes to a call when the others have given up: all name it, itself too; reset makes the op usable."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        op.set_timeout(TIMEOUT_SECS)
        late = {call: lambda: clock.sleep(LATE_SECS)} if context.rank == VICTIM else {}
        seen = steps_until_error(case, op, 1, late)
        seen["text"] = str(raised(RankTimeoutError, op.check))
        arena.rendezvous.barrier("all have heard")
        op.reset()
        run_step(case, op, 3, context.device)
        return seen


@pytest.mark.parametrize(
    ("call", "flagged_max_tokens"),
    [
        ("dispatch", LOW_LATENCY),
        ("combine", BULK),
        pytest.param("dispatch", BULK, marks=pytest.mark.full),
        pytest.param("combine", LOW_LATENCY, marks=pytest.mark.full),
    ],
)
def test_a_late_rank_is_named_by_all(call, flagged_max_tokens):
    found = results_of(3, late_before, case_of(flagged_max_tokens), call)
    for rank, seen in enumerate(found):
        assert (seen["missing"], seen["late"]) == ([], [VICTIM])
        assert seen["call"] == f"{call} 0"
        # in a bulk dispatch others who wait for counts have not come either
        not_come = rf"ranks \[(\d, )*{VICTIM}(, \d)*\] had not come when {call} 2"
        assert re.search(f"this rank, {VICTIM}, came after" if rank == VICTIM else not_come, seen["text"])
        assert rank == VICTIM or TIMEOUT_SECS < seen["secs"] < MOST_SECS


BETWEEN_NODES = over_torch_distributed(
    Case(
        world_size=2,
        num_nodes=2,
        layout="rank_major",
        tokens=((3,),),
        options={"timeout_secs": TIMEOUT_SECS, "first_timeout_secs": 2 * LATE_SECS},
    )
)


def late_between_nodes(context: Context, case: Case) -> None:
    """A rank comes late to each exchange: nobody minds in the op's first step, the other one in the second."""
    with arena_of(context, case) as arena:
        op = make_op(context, case, arena)
        mine = make_inputs(case, 0, context.rank)
        for call in (
            lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids),
            lambda: op.combine(torch.zeros(2, case.max_tokens, case.hidden_dim, dtype=torch.bfloat16), None, None),
        ):
            if context.rank == VICTIM:
                clock.sleep(LATE_SECS)
            call()
        run_step(case, op, 1, context.device)
        op.set_timeout(TIMEOUT_SECS)
        arena.rendezvous.barrier("before one stays away")
        if context.rank != VICTIM:
            start = clock.now()
            error = raised(
                RankTimeoutError,
                lambda: op.dispatch(mine.tokens, mine.weights, None, mine.ids),
                f"within {TIMEOUT_SECS:g} s",
            )
            assert isinstance(error, RankTimeoutError)
            assert (error.missing_ranks, error.late_ranks) == ((), (VICTIM,))
            assert clock.now() - start < MOST_SECS
        arena.rendezvous.barrier("the other has given up")
        op.close()


def test_a_first_step_has_the_longer_bound_between_nodes_too():
    results_of(2, late_between_nodes, BETWEEN_NODES)


def test_ranks_whose_own_kernels_are_done_are_told():
    # the others live and had not begun the step
    found = results_of(3, fault_cases.told_of_a_failure, case_of(LOW_LATENCY), TIMEOUT_SECS)
    assert found == [[[], [0, 2]]] * 3


class ModelError(Exception):
    """What a layer may raise between dispatch and combine."""


def raises_between(context: Context, case: Case) -> dict[str, Any]:
    """An exception leaves op and arena on one rank, which waits for nobody; the others name it, and all begin anew."""
    seen: dict[str, Any] = {}
    arena = Arena(context.group, context.device)
    op = make_op(context, case, arena, index=0)
    run_step(case, op, 0, context.device)
    op.set_timeout(TIMEOUT_SECS)
    arena.rendezvous.barrier("before the exception")
    if context.rank == VICTIM:
        start = 0.0
        try:
            with arena, op:
                Step.dispatch(case, op, 1, context.device).check_dispatched()
                start = clock.now()
                raise ModelError
        except ModelError:
            seen["close_secs"] = clock.now() - start
    else:
        seen = steps_until_error(case, op, 1, {})
        seen["close_secs"] = close_secs(op, arena)
    run_case(context, case)
    return seen


def test_an_exception_between_dispatch_and_combine():
    for rank, seen in enumerate(results_of(3, raises_between, case_of(LOW_LATENCY))):
        assert seen["close_secs"] == 0
        if rank != VICTIM:
            assert (seen["call"], seen["missing"], seen["late"]) == ("combine 0", [], [VICTIM])
            assert seen["secs"] < MOST_SECS


def one_never_closes(context: Context) -> tuple[float, bool]:
    """Seconds of a close, and whether the memory has gone."""
    arena = Arena(context.group, context.device)
    block = arena.acquire("key", 0, SIZES).symmetric["own"]
    start = clock.now()
    if context.rank != VICTIM:
        arena.close()
    secs = clock.now() - start
    again = Arena(context.group, context.device)
    again.rendezvous.barrier("a later arena is not disturbed")
    return secs, block.closed


def test_a_rank_that_does_not_close_is_named_and_not_waited_for_long():
    with messages_of(arena_module.logger, logging.INFO) as texts:
        results = results_of(3, one_never_closes)
    for rank, (secs, closed) in enumerate(results):
        assert closed == (rank != VICTIM)
        assert rank == VICTIM or CLOSE_PATIENCE_SECS <= secs < CLOSE_PATIENCE_SECS + PATIENCE_SECS
    named = f"closes alone: rank {VICTIM} is late"
    closings = sorted(text.partition(" (")[0] for text in texts if "closes alone" in text)
    assert closings == [f"rank {rank} {named}" for rank in (0, 2)]


def skips_a_step(context: Context, case: Case) -> dict[str, Any]:
    """A rank leaves a whole step out: its next one takes that one's place, so it is missed at the end only."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        op.set_timeout(TIMEOUT_SECS)
        arena.rendezvous.barrier("before the step that one leaves out")
        seen = {"call": "none"}
        for number in (1, 2, 3) if context.rank != VICTIM else (2, 3):
            # experts that return what they get: a token comes back once for each rank that it went to, whatever
            # step the others are in
            start = clock.now()
            try:
                check_echo(case, op, number, context.rank)
            except RankTimeoutError as error:
                seen = told_by(error, f"step {number}", start)
                break
        arena.rendezvous.barrier("all have seen it")
        op.reset()
        run_step(case, op, 4, context.device)
        return seen


def check_echo(case: Case, op: EpDispatchCombineOp, number: int, rank: int) -> None:
    step = Step.dispatch(case, op, number, op.device)
    settle(op)
    result, _ = op.combine(step.got[0], None, step.ids)
    settle(op)
    same_bits(result[: len(step.ids)], echo_of(case, number, rank), "echo")


def test_a_rank_that_leaves_a_step_out():
    case = case_of(LOW_LATENCY, with_weights=False, combine_weights=False)
    for rank, seen in enumerate(results_of(3, skips_a_step, case)):
        if rank != VICTIM:
            assert (seen["call"], seen["missing"], seen["late"]) == ("step 3", [], [VICTIM])


def call_in_another_order(context: Context, case: Case) -> str:
    """Rank 0 dispatches by one op and then by another, rank 1 the other way round; all hear that."""
    with Arena(context.group, context.device) as arena:
        ops = [make_op(context, case, arena, index=index) for index in range(2)]
        for op in ops:
            run_step(case, op, 0, context.device)
            op.set_timeout(TIMEOUT_SECS)
        arena.rendezvous.barrier("both ops work")

        def step() -> None:
            Step.dispatch(case, ops[context.rank], 1, context.device)
            ops[context.rank].check()

        error = raised(RankTimeoutError, step, "in the same order on every rank")
        assert isinstance(error, RankTimeoutError)
        assert (error.missing_ranks, error.late_ranks) == ((), ())
        arena.rendezvous.barrier("both have heard")
        for op in ops:
            op.reset()
            run_step(case, op, 2, context.device)
        return str(error)


def test_calls_of_two_ops_in_another_order_are_named_by_all():
    for text in results_of(2, call_in_another_order, TWO):
        first, second = re.findall(r"rank \d in dispatch 2 of the op of index (\d in arena \d+) of the group", text)
        assert (first[0], second[0], first[1:]) == ("0", "1", second[1:])


def reset_against_step(context: Context, case: Case) -> str:
    """Rank 0 resets the op, rank 1 dispatches by it and then resets it, too. Returns what rank 1 hears."""
    with Arena(context.group, context.device) as arena, make_op(context, case, arena) as op:
        run_step(case, op, 0, context.device)
        op.set_timeout(TIMEOUT_SECS)

        def step() -> None:
            Step.dispatch(case, op, 1, op.device)
            op.check()

        error = raised(RankTimeoutError, step, "in the same order on every rank") if context.rank else None
        op.reset()
        run_step(case, op, 2, context.device)
        return str(error)


def test_a_reset_against_a_step_is_named():
    _, text = results_of(2, reset_against_step, TWO)
    assert "rank 0 in the meeting 'resetting the op: start', rank 1 in dispatch 2 of the op" in text


def call_ops_of_two_arenas(context: Context, case: Case) -> str:
    """Ops of one index and one configuration that share no arena, called in another order."""
    arenas = [Arena(context.group, context.device) for _ in range(2)]
    ops = [make_op(context, case, arena, index=0) for arena in arenas]
    op = ops[context.rank]
    op.set_timeout(TIMEOUT_SECS)

    def step() -> None:
        Step.dispatch(case, op, 0, context.device)
        op.check()

    text = str(raised(RankTimeoutError, step, "in the same order on every rank"))
    for each in (*ops, *arenas):
        each.close()
    return text


def test_ops_of_two_arenas_are_told_apart():
    for text in results_of(2, call_ops_of_two_arenas, TWO):
        first, second = re.findall(r"rank \d in dispatch 1 of the op of index 0 in arena (\d+) of the group", text)
        assert int(second) == int(first) + 1
