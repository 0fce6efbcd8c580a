"""Ranks that share one GPU: launches that follow one another need no more places than one launch of every rank."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.simulator.cases import CASES, LATE_RANK, SOON_SECS, run_chain
from tests.simulator.interpreter import Machine, Program
from tests.simulator.ranks import Conditions, Outcome, simulate
from tests.simulator.scheduler import Stuck

VARIANTS = {name: replace(CASES[name], num_steps=2) for name in ("low_latency", "bulk")}
ONE_GPU = Conditions(num_sms=2, dependent=True, limit_secs=20.0)
"""Ranks give each other up after the limit, so programs that keep others out are stuck."""
plain_start = Machine._start


class Places:
    """Places for programs on a GPU. A program keeps the one that it takes until it ends; those of LATE_RANK come late.

    Attributes:
        num_free: places that nobody has. largest: programs of the largest launch.
    """

    def __init__(self, num_free: int) -> None:
        self.num_free, self.largest = num_free, 0

    def start(self, machine: Machine, kernel: Any, program: Program, values: dict[str, Any]) -> None:
        """Stands in for Machine._start."""
        self.largest = max(self.largest, program.grid.num_programs)

        def python(**values: Any) -> None:
            if program.grid.rank.number == LATE_RANK:
                machine.scheduler.sleep(SOON_SECS)
            machine.scheduler.wait(lambda: self.num_free > 0)
            self.num_free -= 1
            kernel.python(**values)
            self.num_free += 1

        plain_start(machine, SimpleNamespace(python=python, __name__=kernel.__name__), program, values)


def run_on_one_gpu(name: str, places: Places) -> Outcome:
    def start(machine: Machine, *args: Any) -> None:
        places.start(machine, *args)

    with mock.patch.object(Machine, "_start", start):
        return simulate(VARIANTS[name].world_size, run_chain, VARIANTS[name], conditions=ONE_GPU)


def places_of(name: str) -> int:
    """Places that one launch of every rank takes."""
    found = Places(1000)
    run_on_one_gpu(name, found)
    return VARIANTS[name].world_size * found.largest


@pytest.mark.parametrize("name", VARIANTS)
def test_dependent_launches_need_no_more_places_than_one_launch_of_every_rank(name):
    """No thread waits for another rank once it has let the next launch take places."""
    outcome = run_on_one_gpu(name, Places(places_of(name)))
    assert outcome.errors == [None] * VARIANTS[name].world_size


def test_launches_that_take_places_too_early_keep_other_ranks_out():
    early = property(lambda _: True, lambda *_: None)
    places = Places(places_of("low_latency"))
    with mock.patch.object(Program, "allows_next", early, create=True), pytest.raises(Stuck):
        run_on_one_gpu("low_latency", places)
