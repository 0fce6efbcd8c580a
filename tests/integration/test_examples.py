"""The examples on CPU; each checks itself."""

import re
import runpy
import sys

import pytest

from tests.integration.programs import (
    EXAMPLES,
    PROGRAM_TIMEOUT_SECS,
    ROOT,
    TRAINING,
    WITH_A_DEATH,
    run_example,
    succeeded,
)


def test_all_examples_are_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, TRAINING, WITH_A_DEATH}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    printed = succeeded(run_example(name, "--ranks", "4"))
    assert printed.count("rank ") == 4
    assert "combine gave every token times the number of ranks it went to" in printed


@pytest.mark.parametrize(
    ("num_ranks", "victims", "lost"),
    # an expert's two copies are on ranks that are neighbours
    [(3, (0,), ()), (4, (1, 3), ()), (4, (0, 3), (0, 4))],
)
def test_the_others_go_on_after_deaths(num_ranks: int, victims: tuple[int, ...], lost: tuple[int, ...]) -> None:
    options = ("--ranks", str(num_ranks), "--secs", str(PROGRAM_TIMEOUT_SECS - 20), "--victim", *map(str, victims))
    printed = succeeded(run_example(WITH_A_DEATH, *options))
    num_left = num_ranks - len(victims)
    assert printed.count(f"ranks {sorted(victims)} are gone") == num_left
    assert printed.count(f"of {num_left}, lost experts {lost}") == num_left
    assert "before and after" in printed


def test_training_has_the_losses_of_a_dense_model() -> None:
    """On any number of ranks; the text is that of the documentation."""
    dense, *spread = (
        [
            float(loss)
            for loss in re.findall(r"loss ([\d.]+)", succeeded(run_example(TRAINING, *options, "--steps", "20")))
        ]
        for options in (("--ranks", "1", "--dense"), ("--ranks", "2"), ("--ranks", "4"))
    )
    assert len(dense) == 20
    assert dense[-1] < 0.8 * dense[0]
    for losses in spread:
        assert losses == pytest.approx(dense, rel=1e-5)


def test_group_example_with_ranks_that_do_not_divide_the_experts() -> None:
    printed = succeeded(run_example("ep_group_example", "--ranks", "3"))
    assert printed.count("combined as expected") == 3


@pytest.mark.parametrize("backend", ["naive", "allgather_reducescatter"])
def test_group_example_on_other_backends(backend: str) -> None:
    succeeded(run_example("ep_group_example", "--ranks", "2", "--backend", backend))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (TRAINING, ("--ranks", "3")),
        (TRAINING, ("--ranks", "2", "--dense")),
        (WITH_A_DEATH, ("--ranks", "2")),
        (WITH_A_DEATH, ("--ranks", "9")),
        (WITH_A_DEATH, ("--victim", "-1")),
        (WITH_A_DEATH, ("--victim", "4")),
        (WITH_A_DEATH, ("--victim", "1", "2", "--ranks", "3")),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_one_line(
    name: str, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.splitlines()[-1].startswith(f"{name}.py: error: argument {options[0]}: ")
