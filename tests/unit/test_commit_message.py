"""The commit-msg hook takes messages of the guide and says what is wrong with others."""

from __future__ import annotations

import pytest

from tools.check_commit_message import problems_of


@pytest.mark.parametrize(
    "message",
    [
        "kernels: check arrival by 32-bit words",
        "ops, kernels: name the fields of a ring\n\nThe tuple had nine places.",
        "docs/vllm: list the files from the flag to dispatch\n# a comment of git",
    ],
)
def test_a_message_of_the_guide_passes(message: str) -> None:
    assert problems_of(message) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Docs: words", "area: what"),
        ("mend it", "area: what"),
        ("", "area: what"),
        ("kernels: " + "x" * 70, "79 characters"),
        ("kernels: check arrival.", "full stop"),
        ("kernels: check arrival\nat once", "second line"),
        ("Merge branch 'main'", "Rebase"),
        ("ops: mend it\n\nSeen in /home/somebody/project.", "path of one machine"),
    ],
)
def test_a_problem_is_named(message: str, problem: str) -> None:
    assert any(problem in found for found in problems_of(message))
