"""What a run that has failed leaves behind; every run of test_sites.py that notices a fault tells of it."""

import gc
import weakref

import pytest

from ep_a2a.memory.arena import Arena
from tests.simulator.ranks import Context
from tests.simulator.runs import SimulationFailed, run_on_ranks


def test_nothing_of_a_run_that_has_failed_is_kept() -> None:
    """A suite with many failures would take gigabytes."""
    groups = []

    def fail(context: Context) -> None:
        groups.append(weakref.ref(context.group))
        with Arena(context.group, context.device):
            raise ValueError

    with pytest.raises(SimulationFailed):
        run_on_ranks(fail, 2)
    gc.collect()
    assert [group() for group in groups] == [None, None]
