"""What the bodies of special op tests share."""

from collections.abc import Callable
from typing import Any

import torch

from ep_a2a import errors
from ep_a2a.testing import RankContext

SHORT_TIMEOUT_SECS = 12.0
"""Long enough for an interpreted step of ranks that share busy cores."""
ABSENT_TIMEOUT_SECS = 5.0
"""Where ranks that have met a moment before wait for one that does not come."""
ENOUGH_SECS = 60.0
BRIEF_TIMEOUT_SECS = 3.0
"""Where nobody is waited for but a rank that is late."""


def synchronize(context: RankContext) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def raised(kind: type[errors.EpA2AError], work: Callable[[], Any], *words: str) -> errors.EpA2AError:
    """The error of `kind` that `work` raises; its text must hold the words."""
    try:
        work()
    except kind as error:
        absent = [word for word in words if word not in str(error)]
        if absent:
            raise AssertionError(f"{absent} not in: {error}") from error
        return error
    raise AssertionError(f"no {kind.__name__}")


def refused(op: Any, kind: type[errors.EpA2AError], work: Callable[[], Any], *words: str) -> errors.EpA2AError:
    """As `raised`, of a call of an op that launches nothing and leaves the op's step as it is."""
    before, was_open = op.memory.steps.clone(), op.has_open_step
    error = raised(kind, work, *words)
    assert op.memory.steps.equal(before), "something was launched"
    assert op.has_open_step == was_open
    return error
