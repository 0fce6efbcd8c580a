"""Budgets of multiprocessors in the bench, where ranks share a GPU: what fits runs, what does not is refused before."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli.app import app
from ep_a2a.commands.bench import command
from ep_a2a.commands.bench.command import check_budgets
from ep_a2a.errors import EpA2AError


def test_budgets_that_fit() -> None:
    check_budgets((0, 4, 8, 16), (2, 8), 1, 132)
    check_budgets((8, 16, 24, 32, 64), (2,), 1, 132)
    # each rank has a GPU of its own: the bound is what the caller likes
    check_budgets((1, 500), (4,), 4, 132)


@pytest.mark.parametrize(
    ("budgets", "num_ranks", "num_gpus", "expected"),
    [
        ((8, 17), (8,), 1, "--max-sms from 4 to 16: 8 ranks share a GPU of 132 multiprocessors; got 17"),
        ((64, 67, 99), (2,), 1, "--max-sms from 4 to 66: 2 ranks share a GPU of 132 multiprocessors; got 67, 99"),
        ((3,), (2,), 1, "--max-sms from 4 to 66"),
        # the most ranks on one GPU decide
        ((33, 45), (2, 5), 2, "--max-sms from 4 to 44: 3 ranks share a GPU of 132 multiprocessors; got 45"),
        ((0,), (64,), 1, "64 ranks with 1 ops of different index share a GPU of 132"),
        ((8,), (40,), 1, "4 multiprocessors at least"),
    ],
)
def test_a_budget_that_cannot_fit_says_what_fits(
    budgets: tuple[int, ...], num_ranks: tuple[int, ...], num_gpus: int, expected: str
) -> None:
    with pytest.raises(EpA2AError) as caught:
        check_budgets(budgets, num_ranks, num_gpus, 132)
    assert expected in " ".join(str(caught.value).split())
    assert "ranks" in caught.value.remedy


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`bench(*arguments)`: the runner and workloads of the command where four GPUs of 132 multiprocessors are."""
    made: list[Any] = []
    monkeypatch.setattr(command, "choose_device", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(command, "measure", lambda sweep, runner, output: made.append((runner, sweep.workloads)))

    def call(*arguments: str) -> Any:
        ended = CliRunner().invoke(app, ["bench", "--device", "cuda", *arguments])
        if not made:
            raise ended.exception or AssertionError(ended.output)
        return made.pop()

    return call


def test_all_ranks_take_the_first_gpu_with_each_budget(bench: Callable[..., Any]) -> None:
    runner, workloads = bench("--shared-gpu", "--max-sms", "8,16,24,32,64")
    assert (runner.num_gpus, {each.ranks for each in workloads}) == (1, {2})
    assert "2 ranks share 1 GPU" in runner.note(2)["note"]
    assert [each.max_sms for each in workloads][:5] == [8, 16, 24, 32, 64]
    runner, workloads = bench()
    assert (runner.num_gpus, {each.ranks for each in workloads}) == (4, {4})


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--shared-gpu --ranks 8 --max-sms 8,24", "--max-sms from 4 to 16"),
        ("--shared-gpu --device cpu", "no --shared-gpu on CPU"),
        ("--shared-gpu --ranks 1", "--ranks of 2 or more with --shared-gpu"),
        ("--shared-gpu --ranks 100", "100 ranks"),
        # without the option, too, where ranks exceed GPUs
        ("--ranks 32 --max-sms 17", "--max-sms from 4 to 16"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(bench: Callable[..., Any], typed: str, expected: str) -> None:
    with pytest.raises(EpA2AError) as caught:
        bench(*typed.split())
    assert expected in str(caught.value)


def test_torchrun_has_placed_its_ranks(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    with pytest.raises(EpA2AError, match="torchrun") as caught:
        bench("--shared-gpu")
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy
