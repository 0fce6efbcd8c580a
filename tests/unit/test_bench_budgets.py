"""Budgets of multiprocessors in the bench, where ranks share a GPU: what fits runs, what does not is refused before."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli.app import app
from ep_a2a.commands.bench import command
from ep_a2a.errors import EpA2AError


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
    # each rank has a GPU of its own: the bound is what the caller likes
    runner, workloads = bench("--max-sms", "1,500")
    assert (runner.num_gpus, {each.ranks for each in workloads}) == (4, {4})


def test_one_rank_has_a_prompt_and_the_others_decode(bench: Callable[..., Any]) -> None:
    (workload,) = bench("--layer", "--uneven")[1]
    assert workload.counts == (8192, 64, 64, 64)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--shared-gpu --ranks 8 --max-sms 8,17", "from 4 to 16: 8 ranks share a GPU of 132 multiprocessors; got 17"),
        ("--shared-gpu --max-sms 64,67,99", "from 4 to 66: 2 ranks share a GPU of 132 multiprocessors; got 67, 99"),
        ("--shared-gpu --max-sms 3", "--max-sms from 4 to 66"),
        # the most ranks on one GPU decide
        ("--ranks 4,9 --max-sms 33,45", "from 4 to 44: 3 ranks share a GPU of 132 multiprocessors; got 45"),
        ("--shared-gpu --ranks 64", "64 ranks with 1 ops of different index share a GPU of 132"),
        ("--shared-gpu --ranks 40 --max-sms 8", "4 multiprocessors at least"),
        ("--shared-gpu --device cpu", "no --shared-gpu on CPU"),
        ("--shared-gpu --ranks 1", "--ranks of 2 or more with --shared-gpu"),
        ("--uneven", "no --uneven without --layer"),
        ("--layer --uneven --micro-batches 8", "no --uneven with --micro-batches"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(bench: Callable[..., Any], typed: str, expected: str) -> None:
    with pytest.raises(EpA2AError) as caught:
        bench(*typed.split())
    assert expected in " ".join(str(caught.value).split())


def test_torchrun_has_placed_its_ranks(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    with pytest.raises(EpA2AError, match="torchrun") as caught:
        bench("--shared-gpu")
    assert "CUDA_VISIBLE_DEVICES" in caught.value.remedy
