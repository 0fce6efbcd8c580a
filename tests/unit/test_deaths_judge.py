"""Which names of survivors tests.deaths takes for right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deaths import BOUND_SECS, Fault, Run, wrong_names

ERROR_AT = 100.0
LONG_AGO, JUST_NOW = ERROR_AT - 2 * BOUND_SECS, ERROR_AT - 0.1
RUN = Run("IntraNode", 4, 0, "compact", "", {0: Fault("kill", 0.5), 2: Fault("kill", 0.5), 3: Fault("stop", 0.5)})


def names(missing: list[int], late: list[int] | None = None) -> dict[str, Any]:
    return {"named": [missing, late or []], "text": "", "at": ERROR_AT, "secs": BOUND_SECS}


@pytest.mark.parametrize(
    ("struck", "seen", "num_wrong"),
    [
        ({0: LONG_AGO, 2: LONG_AGO, 3: LONG_AGO}, {1: names([0, 2])}, 0),
        ({0: LONG_AGO, 2: LONG_AGO, 3: LONG_AGO}, {1: names([0, 2, 3])}, 1),
        ({3: LONG_AGO}, {rank: names([], [3]) for rank in range(3)}, 0),
        ({0: LONG_AGO, 2: JUST_NOW, 3: LONG_AGO}, {1: names([0, 2])}, 0),
        ({0: LONG_AGO}, {1: names([0]), 2: names([0]), 3: names([0, 1])}, 2),
        ({0: LONG_AGO, 2: JUST_NOW}, {1: names([0]), 3: names([0, 2])}, 1),
        ({0: LONG_AGO, 2: LONG_AGO}, {1: names([0, 2], [3]), 3: names([0, 2], [3])}, 2),
        ({0: LONG_AGO, 2: LONG_AGO}, {1: names([0, 2])}, 1),
    ],
    ids=["all", "stop-called-gone", "stop", "killed-just-now", "a-survivor", "disagreement", "late", "silent"],
)
def test_wrong_names(struck: dict[int, float], seen: dict[int, dict[str, Any]], num_wrong: int) -> None:
    assert len(wrong_names(RUN, struck, seen)) == num_wrong
