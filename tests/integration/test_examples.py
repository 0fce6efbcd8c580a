"""The examples on CPU; each checks itself."""

from __future__ import annotations

import pytest

from tests.integration.programs import EXAMPLES, ROOT, run_example, succeeded


def test_all_examples_are_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    printed = succeeded(run_example(name, "--ranks", "4"))
    assert printed.count("rank ") == 4
    assert "combine gave every token times the number of ranks it went to" in printed


@pytest.mark.parametrize("backend", ["naive", "allgather_reducescatter"])
def test_group_example_on_other_backends(backend: str) -> None:
    succeeded(run_example("ep_group_example", "--ranks", "2", "--backend", backend))
