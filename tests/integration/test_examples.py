"""The examples on CPU; each checks itself."""

import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.programs import EXAMPLES, PROGRAM_TIMEOUT_SECS, ROOT, WITH_A_DEATH, run_example, succeeded


def test_all_examples_are_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, WITH_A_DEATH}


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`refusal(name, *options)`: what an example says that ends before it starts a rank, run in this process."""

    def run(name: str, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        printed = capsys.readouterr()
        assert (ended.value.code, printed.out) == (2, "")
        return printed.err

    return run


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


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", "2"),
        ("--victim", "4"),
        ("--ranks", "9"),
        ("--secs", "0"),
        ("--victim", "1", "1"),
        ("--victim", "0", "1", "2"),
        ("--victim", "1", "2", "--ranks", "3"),
    ],
)
def test_the_example_with_deaths_refuses_wrong_numbers(refusal: Any, options: tuple[str, ...]) -> None:
    assert options[0] in refusal(WITH_A_DEATH, *options).splitlines()[-1]


def test_group_example_with_ranks_that_do_not_divide_the_experts() -> None:
    printed = succeeded(run_example("ep_group_example", "--ranks", "3"))
    assert printed.count("combined as expected") == 3


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("ranks", [("0", "cpu"), ("64", "cuda")])
def test_examples_that_would_check_nothing_refuse(refusal: Any, name: str, ranks: tuple[str, str]) -> None:
    said = "--ranks: expected" if ranks[0] == "0" else "--device cuda: there is no GPU"
    assert said in refusal(name, "--ranks", ranks[0], "--device", ranks[1])


@pytest.mark.parametrize(
    ("name", "option", "value", "said"),
    [
        ("deep_ep_example", "--tokens", "-1", "at least 1"),
        ("deep_ep_example", "--hidden", "100", "multiple of"),
        ("direct_api_example", "--hidden", "100", "multiple of"),
        ("direct_api_example", "--topk", "99", "num_experts_per_token"),
        ("ep_group_example", "--topk", "99", "at most the experts"),
        ("ep_group_example", "--hidden", "100", "multiple of"),
        ("ep_group_example", "--backend", "nope", "nope"),
        ("mori_complete_example", "--tokens", "99", "--max-tokens"),
        ("mori_complete_example", "--topk", "99", "at most the experts"),
        ("mori_complete_example", "--hidden", "100", "multiple of"),
    ],
)
def test_examples_refuse_wrong_sizes_in_one_line(refusal: Any, name: str, option: str, value: str, said: str) -> None:
    printed = refusal(name, "--ranks", "2", option, value)
    assert said in printed.splitlines()[-1]
    assert "Traceback" not in printed


@pytest.mark.parametrize("backend", ["naive", "allgather_reducescatter"])
def test_group_example_on_other_backends(backend: str) -> None:
    succeeded(run_example("ep_group_example", "--ranks", "2", "--backend", backend))
