"""Real processes that die while the others wait for them on the host: named within seconds, whatever the bound."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ep_a2a import clock
from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory import rendezvous
from ep_a2a.memory.arena import Arena, BlockSizes
from ep_a2a.memory.host_record import HostRecord
from ep_a2a.memory.subgroups import make_subgroup
from ep_a2a.testing import RankFailure, RankPool
from tests.cases.op_cases import Case, make_op
from tests.cases.op_checks import raised

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


def build(context: RankContext) -> Callable[[], Any]:
    arena = Arena(context.group, context.device)
    return lambda: make_op(context, CASE, arena)


def subgroup(context: RankContext) -> Callable[[], Any]:
    rendezvous.Rendezvous(context.group).barrier("all know each other")
    return lambda: make_subgroup(context.group, range(context.world_size))


PHASES = {each.__name__: each for each in (build, subgroup)}


def die_in(context: RankContext, phase: str, folder: str) -> None:
    """One rank dies when it would wait for the others; each of these writes down whom it names, and when."""
    sleeps = Sleeps()
    sleeps.install()
    work = PHASES[phase](context)
    if context.rank == VICTIM:
        # it has told that it is there before
        rendezvous.Rendezvous.exchange = lambda *_: die()  # type: ignore[method-assign]
        if phase == "subgroup":
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
