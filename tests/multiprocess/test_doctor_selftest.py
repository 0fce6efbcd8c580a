"""The doctor's self-test on real processes: what it measures, and that it finds what is wrong between two ranks."""

import functools
import io
import os
from typing import Any

import pytest
from rich.console import Console

from ep_a2a.commands.doctor import selftest_rank
from ep_a2a.commands.doctor.finding import Level
from ep_a2a.commands.doctor.selftest import SelfTest, judge, run_selftest
from ep_a2a.commands.doctor.selftest_rank import PairResult, check_pair
from ep_a2a.commands.measure import push
from ep_a2a.commands.progress import Progress
from ep_a2a.errors import CheckFailedError, EpA2AError, RankTimeoutError
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing import RankContext

PAIR = (0, 1)
SHORT_SECS = 6.0


def test_two_ranks_are_measured(ranks):
    first, second = ranks(check_pair, 2, PAIR, 0.0)
    assert first == second
    assert min(first.gb_per_s) > 0
    # two directions, each with one push that compiles and one that is timed before the others
    assert (first.num_pushes, first.num_steps) == (6, 3)


def break_bytes(made: Any) -> Any:
    push = made.push

    def changed(launch: Any) -> None:
        push(launch)
        made.landing[7] += 1

    made.push = changed
    return made


def lose_flag(made: Any) -> Any:
    made.push = lambda launch: made.state[selftest_rank.GAVE_UP].fill_(1)
    return made


DAMAGE = {
    "byte": ("Push", break_bytes, CheckFailedError, "bytes pushed"),
    "flag": ("Push", lose_flag, RankTimeoutError, "did not come"),
    # what rank 1 sends is not what the others expect of it
    "row": ("_tokens", lambda tokens: tokens + 1, CheckFailedError, "dispatch of step 0"),
}


def damaged(context: RankContext, what: str) -> tuple[type, str]:
    """The error of this rank in a self-test in which rank 1 damages something."""
    replaced, damage, _, _ = DAMAGE[what]
    original = getattr(selftest_rank, replaced)
    with pytest.MonkeyPatch.context() as patch:
        # so that a rank whose peer has failed does not wait for long
        patch.setattr(selftest_rank, "Rendezvous", functools.partial(Rendezvous, timeout_secs=SHORT_SECS))
        if what == "flag":
            # pushes that do arrive must not be given up
            patch.setattr(push, "CPU_TIMEOUT_SECS", SHORT_SECS)
        patch.setenv("EP_A2A_TIMEOUT_SECS", str(SHORT_SECS))
        if context.rank == 1:
            patch.setattr(selftest_rank, replaced, lambda *args: damage(original(*args)))
        try:
            check_pair(context, PAIR, 0.0)
        except EpA2AError as error:
            return type(error), str(error)
    return type(None), ""


@pytest.mark.parametrize("what", DAMAGE)
def test_what_changes_on_the_way_is_found(ranks, what):
    _, _, kind, words = DAMAGE[what]
    found = ranks(damaged, 2, what)
    assert type(None) not in {error for error, _ in found}
    assert [text for error, text in found if error is kind and words in text], found


def fail_in_two_pairs(context: RankContext, pair: tuple[int, int], secs: float) -> PairResult | None:
    if pair == (0, 1) and context.rank == 1:
        os._exit(7)
    if pair == (0, 2) and context.rank in pair:
        raise RankTimeoutError("the peer's flag", "a flag that did not come")
    # one pair for real: the rank beside it does nothing
    if pair == (1, 2):
        return check_pair(context, pair, secs)
    return None


def test_each_pair_stands_for_itself():
    """Ranks that die or raise take nothing else with them."""
    shown = io.StringIO()
    with Progress("testing", 4, Console(file=shown, width=80)) as progress:
        result = run_selftest("cpu", 3, 0.0, progress, fail_in_two_pairs)
    assert shown.getvalue().splitlines() == [
        "1/4 ranks 0 and 1",
        "2/4 ranks 0 and 2",
        "3/4 ranks 1 and 2",
        "4/4 all ranks together",
    ]
    assert "exit code 7" in result.pairs[0, 1].error
    rates = result.gb_per_s
    assert (rates[0], rates[1][0], rates[2][0]) == ([0, 0, 0], 0, 0)
    assert min(rates[1][2], rates[2][1]) > 0
    assert result.together.error == ""
    assert result.together.num_steps >= 3
    died, raised = (each for each in judge(result) if each.level is Level.ERROR)
    assert (died.subject, raised.subject) == ("ranks 0, 1", "ranks 0, 2")
    assert "EP_A2A_LOG_LEVEL" in died.remedy
    assert raised.found.startswith("RankTimeoutError: expected the peer's flag; got a flag that did not come")
    assert "nvidia-smi topo" in raised.remedy
    assert "failed" in result.table


def measured(rate: float) -> PairResult:
    return PairResult((rate, rate), 100, 10)


def test_a_slow_link_is_a_warning_on_gpus_only():
    pairs = {(0, 1): measured(300), (0, 2): measured(310), (1, 2): measured(20)}
    (first, second) = judge(SelfTest("cuda", 3, pairs))
    assert first.level is second.level is Level.WARNING
    assert (first.subject, second.subject) == ("ranks 1, 2", "ranks 2, 1")
    on_cpu = judge(SelfTest("cpu", 3, pairs))
    assert [each.level for each in on_cpu] == [Level.OK, Level.NOTE]
    assert "says nothing about GPUs" in on_cpu[1].found


def test_ranks_that_fail_together_are_an_error():
    (finding,) = judge(SelfTest("cuda", 2, {PAIR: measured(300)}, PairResult(error="no flag", remedy="Look.")))
    assert (finding.level, finding.subject, finding.remedy) == (Level.ERROR, "all ranks", "Look.")


def test_one_rank_has_nothing_to_measure():
    assert [each.level for each in judge(SelfTest("cpu", 1))] == [Level.NOTE, Level.NOTE]
