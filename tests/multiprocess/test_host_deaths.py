"""Deaths while ranks are on the host, and calls in another order: named within seconds, whatever the bound."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ep_a2a
from ep_a2a import clock
from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory import arena as arena_module
from ep_a2a.memory import rendezvous
from ep_a2a.memory.arena import Arena, BlockSizes
from ep_a2a.memory.host_record import HostRecord
from ep_a2a.memory.subgroups import make_subgroup
from ep_a2a.testing import RankFailure, RankPool
from tests.cases.op_cases import Case, Step, make_op, run_step
from tests.cases.op_checks import raised
from tests.messages import messages_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.testing import RankContext

VICTIM = 1
ON_HOST_SECS = 2.0
SIZES = BlockSizes(512, {"dispatch": 1024}, 64, {"result": 128}, record_words=8)
CASE = Case(world_size=3, hidden_dim=32, num_experts=6, tokens=((4, 3, 5),), max_tokens=5)


class Sleeps:
    """A clock that counts the seconds for which this process meant to sleep, so that other load does not count.

    Attributes:
        alive_at: when the victim's lock was last seen held; the victim has died after that.
    """

    def __init__(self) -> None:
        self.secs = self.alive_at = 0.0

    def now(self) -> float:
        return self.secs

    def sleep(self, secs: float) -> None:
        self.secs += secs
        time.sleep(secs)

    def install(self) -> None:
        """Replaces the clock of this process for good."""
        clock.now, clock.sleep = self.now, self.sleep
        original = HostRecord.has_ended

        def has_ended(record: HostRecord, rank: int) -> bool:
            found = original(record, rank)
            if rank == VICTIM and not found:
                self.alive_at = self.secs
            return found

        HostRecord.has_ended = has_ended  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def first_meeting(context: RankContext) -> Callable[[], Any]:
    return lambda: rendezvous.Rendezvous(context.group).barrier("the first of all")


def build(context: RankContext) -> Callable[[], Any]:
    arena = Arena(context.group, context.device)
    return lambda: make_op(context, CASE, arena)


def reset(context: RankContext) -> Callable[[], Any]:
    return make_op(context, CASE, Arena(context.group, context.device)).reset


def subgroup(context: RankContext) -> Callable[[], Any]:
    rendezvous.Rendezvous(context.group).barrier("all know each other")
    return lambda: make_subgroup(context.group, range(context.world_size))


def close(context: RankContext) -> Callable[[], Any]:
    arena = Arena(context.group, context.device)
    arena.acquire("key", 0, SIZES)

    def close_and_tell() -> None:
        with messages_of(arena_module.logger, logging.INFO) as texts:
            arena.close()
        assert texts[0].startswith(f"rank {context.rank} closes alone: no sign of rank {VICTIM}: rank {VICTIM} is gone")
        raise RankTimeoutError("", "", missing_ranks=(VICTIM,))

    return close_and_tell


PHASES = {each.__name__: each for each in (first_meeting, build, reset, subgroup, close)}


def die_in(context: RankContext, phase: str, folder: str) -> None:
    """One rank dies when it would wait for the others; each of these writes down whom it names, and when."""
    sleeps = Sleeps()
    sleeps.install()
    work = PHASES[phase](context)
    if context.rank == VICTIM:
        # it has told that it is there before
        rendezvous.Rendezvous.exchange = lambda *_: die()  # type: ignore[method-assign]
        if phase in ("subgroup", "close"):
            die()
    error = raised(RankTimeoutError, work)
    assert isinstance(error, RankTimeoutError)
    seen = {"missing": error.missing_ranks, "secs": sleeps.now() - sleeps.alive_at}
    Path(folder, f"{context.rank}.json").write_text(json.dumps(seen))


@pytest.mark.parametrize("phase", PHASES)
def test_a_death_on_the_host_is_named_within_two_seconds(phase: str, tmp_path: Path) -> None:
    with RankPool(3, timeout_secs=60, grace_secs=30) as pool, pytest.raises(RankFailure) as caught:
        pool.run(die_in, phase, str(tmp_path))
    assert sorted(caught.value.tracebacks) == [VICTIM], str(caught.value)
    for rank in (0, 2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["missing"] == [VICTIM]
        assert seen["secs"] < ON_HOST_SECS


def call_in_another_order(context: RankContext, case: Case) -> str:
    """Rank 0 dispatches by one op and then by another, rank 1 the other way round; all hear that."""
    with Arena(context.group, context.device) as arena:
        ops = [make_op(context, case, arena, index=index) for index in range(2)]
        for op in ops:
            run_step(case, op, 0, context.device)
            op.set_timeout(5.0)
        arena.rendezvous.barrier("both ops work")
        op = ops[context.rank]

        def step() -> None:
            Step.dispatch(case, op, 1, op.device)
            op.check()

        error = raised(RankTimeoutError, step, "in the same order on every rank")
        assert isinstance(error, RankTimeoutError)
        assert (error.missing_ranks, error.late_ranks) == ((), ())
        arena.rendezvous.barrier("both have heard")
        for op in ops:
            op.reset()
            run_step(case, op, 2, context.device)
        return str(error)


def test_calls_of_two_ops_in_another_order_are_named_by_all(ranks: Any) -> None:
    for text in ranks(call_in_another_order, 2, Case(world_size=2, hidden_dim=32)):
        first, second = re.findall(r"rank \d in dispatch 2 of the op of index (\d in arena \d+) of the group", text)
        assert (first[0], second[0], first[1:]) == ("0", "1", second[1:])


def reset_against_step(context: RankContext, case: Case) -> str:
    """Rank 0 resets the op, rank 1 dispatches by it and then resets it, too. Returns what rank 1 hears."""
    with Arena(context.group, context.device) as arena, make_op(context, case, arena) as op:
        run_step(case, op, 0, context.device)
        op.set_timeout(2.0)

        def step() -> None:
            Step.dispatch(case, op, 1, op.device)
            op.check()

        error = raised(RankTimeoutError, step, "in the same order on every rank") if context.rank else None
        op.reset()
        run_step(case, op, 2, context.device)
        return str(error)


def test_a_reset_against_a_step_is_named(ranks: Any) -> None:
    _, text = ranks(reset_against_step, 2, Case(world_size=2, hidden_dim=32))
    assert "rank 0 in the meeting 'resetting the op: start', rank 1 in dispatch 2 of the op" in text


def call_in_another_order_by_make_op(context: RankContext) -> str:
    """The same with ops that share no arena; their configurations are equal."""
    tokens, indices = torch.ones(4, 32, dtype=torch.bfloat16), torch.tensor([[0, 3]] * 4, dtype=torch.int32)
    ops = [ep_a2a.make_op(context.group, hidden_size=32, num_experts=4, topk=2, max_tokens=4) for _ in range(2)]
    op = ops[context.rank]
    op.set_timeout(2.0)

    def step() -> None:
        op.dispatch(tokens, None, None, indices)
        op.check()

    text = str(raised(RankTimeoutError, step, "in the same order on every rank"))
    for each in ops:
        each.close()
    return text


def test_ops_of_two_arenas_are_told_apart(ranks: Any) -> None:
    for text in ranks(call_in_another_order_by_make_op, 2):
        first, second = re.findall(r"rank \d in dispatch 1 of the op of index 0 in arena (\d+) of the group", text)
        assert int(second) == int(first) + 1
