"""Random kills and stops, a small sample: `python -m tests.deaths` runs more of them."""

from __future__ import annotations

import pytest

from tests import deaths


@pytest.mark.parametrize("number", [n if n in (0, 7) else pytest.param(n, marks=pytest.mark.full) for n in range(13)])
def test_survivors_name_exactly_those_that_are_gone(number: int) -> None:
    """One run of each path; 0 is a kill inside a node, 7 a kill and a stop over torch.distributed."""
    run = deaths.draw(1, number)
    assert deaths.problems_of(run) == [], run


@pytest.mark.parametrize("split", ["", "mixed"])
@pytest.mark.parametrize("share", [0.30, 0.36, 0.42])
def test_a_rank_that_dies_between_its_rows(share: float, split: str) -> None:
    """One survivor has the dead rank's row and goes on to combine, where it lacks the other survivor, too."""
    faults = {2: deaths.Fault("kill", share)}
    run = deaths.Run("IntraNode", 3, 128, "rank_major", split, faults)
    assert deaths.problems_of(run) == []
