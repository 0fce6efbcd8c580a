"""What passes for rounding where completions of two engines are compared."""

import copy
from typing import Any

import pytest

from tests.engines.vllm.gpu.compare import compare

TOLERANCE = 1e-3


def completions(num_tokens: int) -> dict[int, Any]:
    step = [[1, -0.1], [2, -3.0]]
    return {0: {"tokens": [1] * num_tokens, "top": [copy.deepcopy(step) for _ in range(num_tokens)]}}


def with_changes(found: dict[int, Any], changes: dict[int, float]) -> dict[int, Any]:
    """Completions whose chosen token has another log probability at some steps."""
    for at, difference in changes.items():
        found[0]["top"][at][0][1] += difference
    return found


@pytest.mark.parametrize(
    ("num_ties", "changes", "is_rounding"),
    [
        pytest.param(0, {3: 9e-4, 5: -9e-4}, True, id="within-tolerance"),
        pytest.param(0, {3: 2e-3}, False, id="beyond-it"),
        pytest.param(1, {7: 0.01}, True, id="one-tie"),
        pytest.param(1, {7: 0.01, 9: 0.01}, False, id="too-many-ties"),
        pytest.param(1, {7: 0.6}, False, id="more-than-a-tie"),
    ],
)
def test_log_probabilities(num_ties, changes, is_rounding):
    difference = compare(with_changes(completions(20), changes), completions(20))
    assert difference.num_agreed == 20
    assert difference.is_rounding(TOLERANCE, num_ties) == is_rounding


@pytest.mark.parametrize(("gap", "is_rounding"), [(1e-3, True), (3e-3, False)])
def test_the_first_other_token(gap, is_rounding):
    """It must have been almost as likely; what comes after it says nothing."""
    mine, theirs = completions(20), completions(20)
    mine[0]["tokens"][15] = 2
    theirs[0]["top"][15] = [[1, -0.7], [2, -0.7 - gap]]
    difference = compare(mine, theirs)
    assert difference.num_agreed == 15
    assert difference.is_rounding(TOLERANCE) == is_rounding


def test_half_of_the_tokens_must_agree():
    mine, theirs = completions(20), completions(20)
    mine[0]["tokens"][9] = 2
    theirs[0]["top"][9] = [[1, -0.7], [2, -0.7]]
    assert not compare(mine, theirs).is_rounding(TOLERANCE)
