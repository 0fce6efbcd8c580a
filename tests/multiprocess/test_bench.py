"""The benchmark on CPU processes: every contender passes its gate, and no other is timed."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli.app import app
from ep_a2a.commands.bench import contenders, runner
from ep_a2a.commands.bench.contenders import Contender
from ep_a2a.commands.bench.reference_push import ReferencePush
from ep_a2a.commands.bench.runner import Status, run_in_turn
from ep_a2a.commands.measure.session import RoundTrip
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.errors import CheckFailedError, EpA2AError, UnsupportedError
from ep_a2a.testing.worker import RankContext
from tests.integration.programs import run_cli, run_python, succeeded

QUICK = TimingSettings(num_warmups=0, num_runs=2, num_round_trips=1, num_host_calls=0)
ON_CPU = ("reference_push", "ep_a2a", "nccl_agrs")


def workload_of(ranks: int, **changes: Any) -> Workload:
    values = {"tokens": 3, "hidden": 128, "topk": 2, "experts": 2 * ranks + 1, "quant": "fp8_per_1x128"}
    return Workload(ranks, **values | changes)


def measured(ranks: Any, world_size: int, names: tuple[str, ...] = ON_CPU, **changes: Any) -> list[dict[str, Any]]:
    """The records of contenders, which are equal on all ranks."""
    on_ranks = ranks(run_in_turn, world_size, workload_of(world_size, **changes), names, QUICK)
    assert all(records == on_ranks[0] for records in on_ranks)
    found: list[dict[str, Any]] = on_ranks[0]
    return found


@pytest.mark.parametrize(
    ("world_size", "names", "changes"),
    [
        pytest.param(2, ON_CPU, {"layout": "rank_major"}, id="rank_major"),
        pytest.param(3, ON_CPU, {"routing": "some_dropped", "quant": "fp8_per_token"}, id="some_dropped"),
        pytest.param(2, ("ep_a2a",), {"layout": "expert_major", "routing": "some_dropped"}, id="weighed_on_the_way"),
        pytest.param(2, ("ep_a2a",), {"layout": "expert_major", "quant": "none", "experts": 2}, id="expert_each"),
        pytest.param(4, ON_CPU[::2], {"routing": "all_to_one", "quant": "none"}, id="all_to_one"),
        pytest.param(4, ON_CPU[::2], {"routing": "all_dropped", "tokens": 1}, id="all_dropped"),
        pytest.param(4, ON_CPU[::2], {"routing": "out_of_range", "tokens": 40}, id="out_of_range"),
    ],
)
def test_contenders_are_checked_and_timed(
    ranks: Any, world_size: int, names: tuple[str, ...], changes: dict[str, Any]
) -> None:
    for row in measured(ranks, world_size, names, **changes):
        assert (row["status"], row.get("reason")) == (Status.OK, None)
        assert row["round_trip_p99_us"] >= row["round_trip_us"] > 0
        assert not row["in_graph"]


@pytest.mark.parametrize("name", ["ep_a2a", *contenders.BETWEEN_NODES])
def test_virtual_nodes(ranks: Any, name: str) -> None:
    (row,) = measured(ranks, 4, (name,), gpus_per_node=2, layout="rank_major")
    assert (row["status"], row.get("reason")) == (Status.OK, None)


@pytest.mark.parametrize(
    ("name", "world_size", "reason"),
    [
        *((name, 2, "all ranks are on one node") for name in contenders.BETWEEN_NODES),
        *((name, 2, "needs GPUs") for name in ("flashinfer", "deepep")),
        ("reference_push", 1, "one rank has no peers"),
    ],
)
def test_what_cannot_run_says_why(name: str, world_size: int, reason: str) -> None:
    said = contenders.make_contender(name).unavailable(workload_of(world_size), torch.device("cpu"))
    assert said == reason


def run_on_a_shared_gpu(context: RankContext, workload: Workload) -> tuple[dict[str, Any], list[int]]:
    """The push's record as where all ranks share a GPU, and the sources of its dispatch."""
    sharing = replace(context, ranks_per_gpu=context.world_size)
    (row,) = run_in_turn(sharing, workload, ["reference_push"], QUICK)
    with contextlib.closing(ReferencePush(workload, sharing)) as session:
        return row, sorted(session._dispatch.received)


@pytest.mark.parametrize("changes", [{}, {"routing": "all_to_one"}], ids=str)
def test_on_a_shared_gpu_the_push_counts_local_rows(ranks, changes):
    for row, sources in ranks(run_on_a_shared_gpu, 3, workload_of(3, max_sms=8, **changes)):
        assert (row["status"], row.get("reason")) == (Status.OK, None)
        # its own rows, too, from all three ranks
        assert sources == [0, 1, 2]
        assert row["details"]["counts_local_rows"]


def lose_a_byte(context: RankContext) -> str:
    """A push whose last byte does not arrive, seen by the rank that misses it."""
    with contextlib.closing(ReferencePush(workload_of(2), context)) as session:
        session.check()
        send = session.combine

        def lossy(dispatched: Any) -> torch.Tensor:
            landing = send(dispatched)
            received = session._combine.received[1 - context.rank]
            landing[(received[2] + received[1]) * 16 - 1] ^= 1
            return landing

        session.combine = lossy  # type: ignore[method-assign]
        try:
            session.check()
        except CheckFailedError as error:
            return str(error)
    return "nothing seen"


def test_the_push_misses_no_single_byte(ranks):
    for text in ranks(lose_a_byte, 2):
        assert "1 others" in text


class LosesAFlag(ReferencePush):
    """Gives up a wait on rank 1, though the bytes were right when they were checked."""

    checked = False

    def check(self) -> None:
        super().check()
        self.checked = True

    def dispatch(self) -> None:
        super().dispatch()
        self._combine.state[2] |= self.checked and self._context.rank


def lose_a_flag(context: RankContext) -> dict[str, Any]:
    with mock.patch.object(runner, "make_contender", return_value=Contender(LosesAFlag)):
        return run_in_turn(context, workload_of(2), ["reference_push"], QUICK)[0]


def test_a_flag_that_does_not_come_is_seen_after_the_timing(ranks):
    for row in ranks(lose_a_flag, 2):
        assert row["status"] == Status.ERROR
        assert row["reason"].startswith("after the timing, rank 1: RankTimeoutError")


class Misbehaving(RoundTrip):
    """Does what `how` says, on rank 1 only."""

    def __init__(self, how: str, context: RankContext) -> None:
        super().__init__()
        self.how = how if context.rank == 1 else "behaves"
        if self.how == "refuses":
            raise UnsupportedError("something else", "this")
        if self.how == "raises":
            raise ValueError("no idea [1]")

    def dispatch(self) -> None:
        assert self.how not in ("is wrong", "refuses", "raises"), "it must not be timed"

    def combine(self, dispatched: None) -> torch.Tensor:
        if self.how == "breaks":
            raise RuntimeError("broken")
        return torch.empty(0)

    def check(self) -> None:
        if self.how == "is wrong":
            raise CheckFailedError("one", "two")


def run_misbehaving(context: RankContext, how: str) -> dict[str, Any]:
    contender = Contender(lambda workload, context: Misbehaving(how, context))
    with mock.patch.object(runner, "make_contender", return_value=contender):
        return run_in_turn(context, workload_of(2), ["misbehaving"], QUICK)[0]


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        ("behaves", Status.OK, ""),
        ("refuses", Status.UNAVAILABLE, "rank 1: UnsupportedError: expected something else"),
        ("raises", Status.ERROR, "preparing, rank 1: ValueError: no idea [1]"),
        ("is wrong", Status.FAILED, "checking, rank 1: CheckFailedError: expected one; got two"),
    ],
)
def test_one_rank_decides_for_all(ranks, how, status, text):
    rows = ranks(run_misbehaving, 2, how)
    for row in rows:
        assert row["status"] == status
        assert text in row.get("reason", "")
        assert ("round_trip_us" in row) == (status == Status.OK)
    assert rows[0] == rows[1]


def run_or_die(context: RankContext, workload: Workload, names: list[str], settings: TimingSettings) -> Any:
    if names == ["dies"] and context.rank == 1:
        os._exit(7)
    return run_in_turn(context, workload, names, settings)


def test_neither_errors_nor_dead_processes_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run_in_turn", run_or_die)
    with contextlib.closing(runner.Runner("cpu")) as ranks:
        names = ("smoke_signals", "nccl_agrs", "dies", "reference_push")
        rows = [ranks.run(workload_of(2), [name], QUICK)[0] for name in names]
    assert [row["status"] for row in rows] == [Status.ERROR, Status.OK, Status.ERROR, Status.OK]
    assert "UnknownNameError" in rows[0]["reason"]
    assert "exit code 7" in rows[2]["reason"]


SHAPE = "--tokens 1,2 --hidden 128 --topk 2 --experts 4"
SMALL = ("bench", "--device", "cpu", "--ranks", "2", *SHAPE.split())


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    measured = ["--contenders", "reference_push,nccl_agrs,deepep", "--iterations", "2"]
    printed = succeeded(run_cli(*SMALL, *measured, f"--output={path}"))
    assert printed.startswith("Right: 4 of 4 results on 2 CPU processes.")
    assert printed.count("functional check") == 1
    assert printed.count("deepep unavailable (T = 1, 2): needs GPUs") == 1
    header, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert (header["record"], header["device"]) == ("header", "cpu")
    assert {row["device"] for row in rows} == {"cpu"}
    assert [(row["tokens"], row["contender"], row["status"]) for row in rows] == [
        (tokens, name, status)
        for tokens in (1, 2)
        for name, status in (("reference_push", "ok"), ("nccl_agrs", "ok"), ("deepep", "unavailable"))
    ]
    # there is no such time on CPU
    assert [row.get("round_trip_cold_us", "absent") for row in rows] == [None, None, "absent"] * 2
    # ratios of CPU times would say nothing about GPUs
    assert not any({"dispatch_gb_per_s", "dispatch_fraction_of_limit"} & set(row) for row in rows)


def test_nothing_measured_is_an_error_with_a_remedy() -> None:
    error = CliRunner().invoke(app, [*SMALL, "--contenders", "deepep,flashinfer"]).exception
    assert isinstance(error, EpA2AError)
    assert "deepep unavailable (T = 1, 2): needs GPUs; flashinfer unavailable" in str(error)


def test_torchrun_starts_the_ranks_too(tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ep_a2a")
    first = SMALL.index("--ranks")
    arguments = SMALL[:first] + SMALL[first + 2 :]
    options = ("--contenders", "reference_push,nccl_agrs", "--iterations", "2", "--output", str(path))
    printed = succeeded(run_python(*torchrun, *arguments, *options))
    assert printed.count("functional check") == 1
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [(row["ranks"], row["contender"], row["status"]) for row in rows] == [
        (2, name, "ok") for _ in (1, 2) for name in ("reference_push", "nccl_agrs")
    ]
