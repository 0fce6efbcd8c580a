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


def test_group_example_with_ranks_that_do_not_divide_the_experts() -> None:
    printed = succeeded(run_example("ep_group_example", "--ranks", "3"))
    assert printed.count("combined as expected") == 3


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("ranks", [("0", "cpu"), ("64", "cuda")])
def test_examples_that_would_check_nothing_refuse(name: str, ranks: tuple[str, str]) -> None:
    done = run_example(name, "--ranks", ranks[0], "--device", ranks[1])
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--ranks {ranks[0]}" in done.stderr


@pytest.mark.parametrize("backend", ["naive", "allgather_reducescatter"])
def test_group_example_on_other_backends(backend: str) -> None:
    succeeded(run_example("ep_group_example", "--ranks", "2", "--backend", backend))
