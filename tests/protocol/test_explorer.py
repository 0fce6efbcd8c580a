"""The machine and the explorer themselves: which orders there are, and that what goes wrong is found."""

from __future__ import annotations

import dataclasses

import pytest

from tests.protocol import rules
from tests.protocol.catalogue import MUTANTS, RIGHT, Case
from tests.protocol.explorer import explore
from tests.protocol.machine import DEADLOCK, Action, Launch, Model, Program, Store, Violation, Words
from tests.protocol.residency import ResidencyRules

DATA, FLAG, OTHER = range(3)


class Litmus(Model):
    """One step of ranks that have a launch of one program each, or several launches."""

    num_steps = 1

    def __init__(self, *ranks: Program | tuple[Launch, ...], launches_drain: bool = True, is_reduced: bool = False):
        self.programs, self.num_ranks = ranks, len(ranks)
        self.launches_drain, self.is_reduced = launches_drain, is_reduced
        self.words = Words()
        for name in ("DATA", "FLAG", "OTHER"):
            self.words.region(name)

    def initial_memory(self):
        return bytes(3)

    def choices(self, memory, rank, step):
        yield memory, "the only way"

    def launches(self, rank, step, choice):
        program = self.programs[rank]
        return program if program and not isinstance(program[0], Action) else ((program,),)

    def check_store(self, memory, store: Store):
        pass


def stores(word, value, *, signal=False):
    def take(turn):
        (turn.signal if signal else turn.store)(word, value)
        return True

    return Action(f"stores {word}", take, is_local=True)


def fence():
    return Action("passes a fence", lambda turn: turn.has_drained(), is_local=True)


def sees(word, value, *, is_stable=False):
    return Action(f"sees {word} = {value}", lambda turn: turn.memory[word] == value, is_stable=is_stable)


def must_see(word, value):
    def take(turn):
        if turn.memory[word] != value:
            raise Violation(f"saw {turn.memory[word]}")
        return True

    return Action(f"must see {word} = {value}", take)


READER = (sees(FLAG, 1), must_see(DATA, 1))
every_mode = pytest.mark.parametrize("is_reduced", [False, True], ids=["all states", "reduced"])


@every_mode
def test_a_flag_may_overtake_data(is_reduced):
    writer = (stores(DATA, 1), stores(FLAG, 1, signal=True))
    outcome = explore(Litmus(writer, READER, is_reduced=is_reduced))
    assert outcome.violation == "saw 0"
    assert [line for line in outcome.trace if "arrives" in line] == ["rank 0: FLAG = 1 arrives"]
    assert outcome.trace[-1] == "rank 1: must see 0 = 1"


@every_mode
def test_a_flag_behind_a_fence_does_not(is_reduced):
    writer = (stores(DATA, 1), fence(), stores(FLAG, 1, signal=True))
    assert explore(Litmus(writer, READER, is_reduced=is_reduced)).violation is None


def test_a_rank_may_read_before_its_own_store_is_seen():
    # both ranks see the other's word unwritten, which no order of their actions explains
    first = (stores(DATA, 1), must_see(FLAG, 1))
    second = (stores(FLAG, 1), sees(DATA, 0))
    assert explore(Litmus(first, second)).violation == "saw 0"


def test_stores_to_one_word_stay_in_order():
    writer = (stores(DATA, 1), stores(DATA, 2), fence(), stores(FLAG, 1))
    assert explore(Litmus(writer, (sees(FLAG, 1), must_see(DATA, 2)))).violation is None


def test_what_is_seen_stays_seen():
    writer = (stores(DATA, 1), fence(), stores(FLAG, 1))
    relay = (sees(FLAG, 1), stores(OTHER, 1))
    assert explore(Litmus(writer, relay, (sees(OTHER, 1), must_see(DATA, 1)))).violation is None


@pytest.mark.parametrize(("launches_drain", "violation"), [(True, None), (False, "saw 0")])
def test_the_end_of_a_launch_is_a_fence_where_it_is_taken_for_one(launches_drain, violation):
    writer = (((stores(DATA, 1),),), ((stores(FLAG, 1),),))
    assert explore(Litmus(writer, READER, launches_drain=launches_drain)).violation == violation


def test_a_fence_covers_earlier_launches_but_no_other_program():
    earlier = (((stores(DATA, 1),),), ((fence(), stores(FLAG, 1)),))
    assert explore(Litmus(earlier, READER, launches_drain=False)).violation is None
    beside = (((stores(DATA, 1),), (fence(), stores(FLAG, 1))),)
    assert explore(Litmus(beside, READER)).violation == "saw 0"


def test_ranks_that_wait_for_each_other_are_found():
    outcome = explore(Litmus((sees(FLAG, 1), stores(DATA, 1)), (sees(DATA, 1), stores(FLAG, 1))))
    assert outcome.violation == DEADLOCK
    assert "rank 1: waits in vain until it sees 0 = 1" in outcome.trace
    assert str(outcome).startswith("deadlock (1 states)\n")


def test_a_wait_may_be_too_late_for_what_it_waits_for():
    writer = (stores(FLAG, 1), fence(), stores(FLAG, 2))
    assert explore(Litmus(writer, (sees(FLAG, 1),))).violation == DEADLOCK


def test_a_model_that_is_too_large_is_an_error():
    writer = tuple(stores(word, 1) for word in (DATA, FLAG, OTHER))
    with pytest.raises(RuntimeError, match="more than 4 states"):
        explore(Litmus(writer), max_states=4)


def whole_cases() -> list[Case]:
    # `!=` is not stable: a wait for it may come too late, which the reduction takes to be impossible.
    # Launches on one GPU store nothing that is only waited for, so there is nothing to reduce.
    return [
        case
        for case in (*RIGHT, *MUTANTS)
        if not (case.rules.is_reduced or isinstance(case.rules, ResidencyRules))
        and getattr(case.rules, "late", None) is not rules.differs
    ]


@pytest.mark.parametrize("case", whole_cases(), ids=lambda case: case.name)
def test_the_reduction_leaves_out_no_way_to_go_wrong(case):
    reduced = Case(case.name, dataclasses.replace(case.rules, is_reduced=True), case.caught_as)
    assert (reduced.outcome.violation is None) == (case.outcome.violation is None), str(reduced.outcome)
    assert reduced.outcome.violation or reduced.outcome.num_states < case.outcome.num_states
