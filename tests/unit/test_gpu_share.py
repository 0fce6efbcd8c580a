"""Ranks that share GPUs: who uses which, how many multiprocessors each gets, and what is said."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.commands.bench.runner import JoinedRunner, Runner
from ep_a2a.errors import GpuLostError, UnsupportedError
from ep_a2a.memory import gpus
from ep_a2a.ops.sm_share import share_of
from ep_a2a.testing import RankPool, launch, worker
from ep_a2a.testing.mps import PIPE_VARIABLE, Mps
from ep_a2a.topology.gpu_share import gpu_of, ranks_per_gpu

CUDA = torch.device("cuda", 0)


def test_ranks_take_gpus_in_turn() -> None:
    assert [gpu_of(rank, 3) for rank in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [ranks_per_gpu(8, num_gpus) for num_gpus in (0, 1, 3, 8, 9)] == [0, 8, 3, 1, 1]


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "ranks_per_gpu", "note"),
    [
        (8, 1, 8, "8 ranks share 1 GPU: times are not those of NVLink"),
        (1, 1, 1, ""),
        (4, 2, 2, "4 ranks share 2 GPUs: times are not those of NVLink"),
    ],
)
def test_what_a_pool_says_of_its_gpus(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_gpus: int, ranks_per_gpu: int, note: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(launch, "find_mps", lambda: Mps.NONE)
    pool = RankPool(num_ranks, device="cuda")
    backend = "gloo" if ranks_per_gpu > 1 else "cpu:gloo,cuda:nccl"
    assert (pool.ranks_per_gpu, pool.backend, pool.note) == (ranks_per_gpu, backend, note)
    assert Runner("cuda").note(num_ranks).get("note", "") == note


def test_a_pool_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert RankPool(2).ranks_per_gpu == 0
    with pytest.raises(UnsupportedError, match="a GPU"):
        RankPool(1, device="cuda")


def test_a_pool_can_do_without_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "find_mps", lambda: pytest.fail("looked for MPS"))
    # nor must ranks find a daemon of the user
    monkeypatch.setenv(PIPE_VARIABLE, "/tmp/a-daemon")
    assert RankPool(2, device="cuda", mps=False)._start_mps("/tmp/empty") == {PIPE_VARIABLE: "/tmp/empty"}


@pytest.mark.parametrize("found", [Mps.NONE, Mps.SILENT, Mps.OF_THE_USER])
def test_ranks_meet_no_daemon_that_is_not_trusted(monkeypatch: pytest.MonkeyPatch, found: Mps) -> None:
    """Without the variable CUDA connects to a daemon in its usual place, whoever runs it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "find_mps", lambda: found)
    expected = {PIPE_VARIABLE: "/tmp/empty"} if found is Mps.NONE else {}
    assert RankPool(2, device="cuda")._start_mps("/tmp/empty") == expected


@pytest.mark.parametrize("text", ["CUDA error: unspecified launch failure", "Triton Error [CUDA]: unspecified failure"])
def test_a_context_that_is_lost_is_told_whoever_met_it_first(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def lost(_: torch.device) -> None:
        raise RuntimeError("CUDA error: the context is gone\nMore of it.")

    error, gpu = RuntimeError(text), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert worker._with_its_cause(gpu, error) is error
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    found = worker._with_its_cause(gpu, error)
    assert isinstance(found, GpuLostError)
    assert found.__cause__ is error
    other = RuntimeError("something else")
    assert worker._with_its_cause(gpu, other) is other


def test_ranks_of_other_hosts_are_not_counted() -> None:
    # 16 ranks of two hosts with eight GPUs each: this host's number of GPUs says nothing about the job
    joined = JoinedRunner.__new__(JoinedRunner)
    joined.num_gpus = 16
    assert joined.note(16) == {}


class Meeting:
    """A meeting of ranks whose GPUs are these."""

    def __init__(self, uuids: list[str]) -> None:
        self._uuids = uuids

    def exchange(self, label: str, message: Any) -> list[str]:
        return self._uuids


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="a", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_gpus_are_told_apart_by_their_identity() -> None:
    meeting: Any = Meeting(["a", "b", "a"])
    assert gpus.ranks_by_gpu(meeting, CUDA) == {"a": (0, 2), "b": (1,)}
    assert gpus.ranks_by_gpu(meeting, torch.device("cpu")) == {}


def test_nccl_is_refused_with_the_ranks_that_share() -> None:
    own: Any = Meeting(["a", "b"])
    gpus.require_own_gpus(own, CUDA)
    shared: Any = Meeting(["a", "b", "a", "b"])
    with pytest.raises(UnsupportedError, match=r"ranks 0, 2 use one; ranks 1, 3 use one") as caught:
        gpus.require_own_gpus(shared, CUDA)
    assert "'ep_a2a'" in caught.value.remedy


def test_masks_are_refused_where_ranks_share_a_gpu_through_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PIPE_VARIABLE, str(tmp_path))
    gpus.refuse_masks_under_mps()
    (tmp_path / "control").touch()
    with pytest.raises(UnsupportedError, match="without MPS"):
        gpus.refuse_masks_under_mps()


def test_all_programs_that_wait_fit_on_the_gpu() -> None:
    for num_ranks in range(1, 9):
        for num_ops in range(1, 5):
            assert 4 <= share_of(132, num_ranks, num_ops) <= 132 / (num_ranks * num_ops)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="8 ranks with 5 ops of different index share a GPU of 132"):
        share_of(132, 8, 5)
