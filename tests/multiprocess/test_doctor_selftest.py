"""The doctor's self-test on real processes: what it measures, and that it finds what is wrong between two ranks."""

import functools
import os
from typing import Any

import pytest

from ep_a2a.commands.doctor import selftest
from ep_a2a.commands.doctor.checks import Level
from ep_a2a.commands.doctor.selftest import CPU_NOTE, Result, SelfTest, check_ranks, judge, run_selftest
from ep_a2a.commands.measure import push
from ep_a2a.errors import CheckFailedError, EpA2AError, RankTimeoutError
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing import RankContext

PAIR = (0, 1)
SHORT_SECS = 6.0


def break_bytes(made: Any) -> Any:
    push = made.push

    def changed(launch: Any) -> None:
        push(launch)
        made.landing[7] += 1

    made.push = changed
    return made


def lose_flag(made: Any) -> Any:
    made.push = lambda launch: made.state[push.GAVE_UP].fill_(1)
    return made


DAMAGE = {
    "byte": ("Push", break_bytes, CheckFailedError, "words; got 1 others"),
    "flag": ("Push", lose_flag, RankTimeoutError, "did not come"),
    # what rank 1 sends is not what the others expect of it
    "row": ("_tokens", lambda tokens: tokens + 1, CheckFailedError, "dispatch of step 0"),
}


def damaged(context: RankContext, what: str) -> tuple[type, str]:
    """The error of this rank in a self-test in which rank 1 damages something."""
    replaced, damage, _, _ = DAMAGE[what]
    original = getattr(selftest, replaced)
    with pytest.MonkeyPatch.context() as patch:
        # so that a rank whose peer has failed does not wait for long
        patch.setattr(selftest, "Rendezvous", functools.partial(Rendezvous, timeout_secs=SHORT_SECS))
        if what == "flag":
            # pushes that do arrive must not be given up
            patch.setattr(push, "CPU_TIMEOUT_SECS", SHORT_SECS)
        patch.setenv("EP_A2A_TIMEOUT_SECS", str(SHORT_SECS))
        if context.rank == 1:
            patch.setattr(selftest, replaced, lambda *args: damage(original(*args)))
        try:
            check_ranks(context, PAIR, 0.0)
        except EpA2AError as error:
            return type(error), str(error)
    return type(None), ""


@pytest.mark.parametrize("what", DAMAGE)
def test_what_changes_on_the_way_is_found(ranks, what):
    _, _, kind, words = DAMAGE[what]
    found = ranks(damaged, 2, what)
    assert type(None) not in {error for error, _ in found}
    assert [text for error, text in found if error is kind and words in text], found


def fail_in_two_pairs(context: RankContext, ranks: tuple[int, ...], secs: float) -> Result | None:
    if ranks == (0, 1) and context.rank == 1:
        os._exit(7)
    if ranks == (0, 2) and context.rank in ranks:
        raise RankTimeoutError("the peer's flag", "a flag that did not come")
    # one pair for real: the rank beside it does nothing
    return check_ranks(context, ranks, secs) if ranks not in ((0, 1), (0, 2)) else None


def test_each_pair_stands_for_itself(capsys):
    """Ranks that die or raise take nothing else with them."""
    test = run_selftest("cpu", 3, 0.0, fail_in_two_pairs)
    assert capsys.readouterr().err.splitlines() == [
        "1/4 ranks 0, 1",
        "2/4 ranks 0, 2",
        "3/4 ranks 1, 2",
        "4/4 ranks 0, 1, 2",
    ]
    died, raised, right, together = test.results.values()
    assert "exit code 7" in died.error
    # two directions, each with one push that compiles and one that is timed before the others
    assert (right.gb_per_s > 0, right.num_pushes, right.num_steps) == (True, 6, 3)
    assert (together.error, together.num_steps) == ("", 3)
    died, raised = (each for each in judge(test) if each.level is Level.ERROR)
    assert (died.subject, raised.subject) == ("ranks 0, 1", "ranks 0, 2")
    assert "EP_A2A_LOG_LEVEL" in died.remedy
    assert raised.found.startswith("RankTimeoutError: expected the peer's flag; got a flag that did not come")
    assert "nvidia-smi topo" in raised.remedy


def test_a_slow_link_is_a_warning_on_gpus_only():
    rates = {"ranks 0, 1": 300.0, "ranks 0, 2": 310.0, "ranks 1, 2": 20.0}
    results = {name: Result(rate, 100, 10) for name, rate in rates.items()}
    (slow,) = [each for each in judge(SelfTest(results=results)) if each.level is not Level.OK]
    assert (slow.level, slow.subject) == (Level.WARNING, "ranks 1, 2")
    on_cpu = judge(SelfTest(CPU_NOTE, results))
    assert [each.level for each in on_cpu] == [Level.NOTE, *[Level.OK] * 3]
    assert "says nothing about GPUs" in on_cpu[0].found


def test_one_rank_has_nothing_to_measure():
    levels = [each.level for each in judge(SelfTest(CPU_NOTE, {"ranks 0": Result(num_steps=3)}))]
    assert levels == [Level.NOTE, Level.OK, Level.NOTE]
