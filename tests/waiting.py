"""Waits for signs of other processes. Only this module pauses the process of a test."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECS = 60.0
"""For a sign that comes soon; a test that passes never waits that long."""
SHORTEST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.002, 0.25


def happens(condition: Callable[[], object], within_secs: float) -> bool:
    """Whether a condition becomes true within this time. Pauses between two looks grow with the time waited."""
    start = time.monotonic()
    while not condition():
        waited_secs = time.monotonic() - start
        if waited_secs > within_secs:
            return False
        time.sleep(min(max(SHORTEST_PAUSE_SECS, waited_secs / 10), LONGEST_PAUSE_SECS))
    return True


def await_until(condition: Callable[[], object], what: str, patience_secs: float = PATIENCE_SECS) -> None:
    """Return when a condition is true.

    Raises:
        AssertionError: `what` has not happened within the patience.
    """
    assert happens(condition, patience_secs), f"{what}: not within {patience_secs:g} s"


def await_file(*paths: Path, patience_secs: float = PATIENCE_SECS) -> None:
    """Return when one of the files exists."""
    names = " or ".join(path.name for path in paths)
    await_until(lambda: any(path.exists() for path in paths), names, patience_secs)
