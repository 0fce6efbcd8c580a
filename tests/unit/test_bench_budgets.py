"""Budgets of multiprocessors in the bench, where ranks share a GPU: what fits runs, what does not is refused before."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.cli.bench import OPTIONS
from ep_a2a.cli.command import values_of
from ep_a2a.commands.bench import command
from ep_a2a.commands.bench.command import check_budgets
from ep_a2a.commands.options import Device
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


def options_of(**changes: Any) -> SimpleNamespace:
    typed = {each.name: each.default for each in OPTIONS} | {"device": Device.CUDA, "shared_gpu": True} | changes
    return values_of(OPTIONS, typed)


@pytest.fixture
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs of 132 multiprocessors, on which nothing may start."""
    monkeypatch.setattr(command, "choose_device", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(command, "execute", lambda runner, workloads, *_, **__: (runner, workloads))


@pytest.mark.usefixtures("_four_gpus")
def test_all_ranks_take_the_first_gpu_with_each_budget() -> None:
    runner, workloads = command.run(options_of(max_sms="8,16,24,32,64"))  # type: ignore[misc]
    assert (runner.num_gpus, {each.world_size for each in workloads}) == (1, {2})
    assert "2 ranks share 1 GPU" in runner.note(2)
    assert [each.max_sms for each in workloads][:5] == [8, 16, 24, 32, 64]
    runner, workloads = command.run(options_of(shared_gpu=False))  # type: ignore[misc]
    assert (runner.num_gpus, {each.world_size for each in workloads}) == (4, {4})


@pytest.mark.usefixtures("_four_gpus")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ranks": "8", "max_sms": "8,24"}, "--max-sms from 4 to 16"),
        ({"device": Device.CPU}, "GPUs with --shared-gpu"),
        ({"ranks": "1"}, "--ranks of 2 or more with --shared-gpu"),
        ({"ranks": "100"}, "100 ranks"),
        ({"max_sms": "8,8"}, "--max-sms"),
        ({"max_sms": "-8"}, "--max-sms"),
        ({"max_sms": "8.5"}, "--max-sms"),
        # without the option, too, where ranks exceed GPUs
        ({"shared_gpu": False, "ranks": "32", "max_sms": "17"}, "--max-sms from 4 to 16"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_anything_starts(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(EpA2AError) as caught:
        command.run(options_of(**changes))
    assert expected in str(caught.value)


@pytest.mark.usefixtures("_four_gpus")
def test_torchrun_has_placed_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    with pytest.raises(EpA2AError, match="torchrun") as caught:
        command.run(options_of())
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy
