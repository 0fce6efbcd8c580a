"""Columns and tables of the benchmark, from rows that are made up."""

import io
import json
import re
import subprocess
from typing import Any

import pytest
from rich.console import Console

from ep_a2a.commands.bench import report
from ep_a2a.commands.bench.command import Sweep, measure
from ep_a2a.commands.bench.report import CPU_NOTE, compare, constant_fields, describe, make_table, reasons, show
from ep_a2a.commands.bench.runner import Runner, Status, make_record, over_rounds
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload

HEADER = {"record": "header", "device": "cuda", "torch": "2.13", "note": CPU_NOTE}


def workload_of(tokens: int, **changes: Any) -> Workload:
    return Workload(2, tokens, hidden=256, topk=2, experts=4, routing="one_expert_per_rank", **changes)


def times_of(dispatch: float, combine: float, round_trip: float, host: float | None = None) -> dict[str, Any]:
    us = {"dispatch": dispatch, "combine": combine, "round_trip": round_trip}
    found: dict[str, Any] = {f"{phase}_us": value for phase, value in us.items()}
    found |= {f"{phase}_p99_us": value * 2 for phase, value in us.items()}
    found |= {"round_trip_cold_us": None, "in_graph": host is not None}
    return found | ({"dispatch_host_us": host, "combine_host_us": host} if host is not None else {})


def rows_of(workload: Workload, device: str = "cuda") -> list[dict[str, Any]]:
    times = {"reference_push": times_of(10, 20, 25, 3), "ep_a2a": times_of(20, 25, 50, 4)}
    times["nccl_agrs"] = times_of(40, 60, 100)
    return [
        *(make_record(workload, device, name, Status.OK) | us for name, us in times.items()),
        make_record(workload, device, "deepep", Status.FAILED, "checking, rank 1: wrong [x]"),
        make_record(workload, device, "flashinfer", Status.UNAVAILABLE, "needs GPUs"),
    ]


def test_columns_are_worked_out_from_bytes_and_times():
    # every token goes to both ranks: one remote row per token
    limit, native, baseline, failed, absent = compare(rows_of(workload_of(8)))
    assert native["dispatch_bytes"] == native["combine_bytes"] == 8 * 512
    assert native["dispatch_gb_per_s"] == pytest.approx(8 * 512 / 20e-6 / 1e9)
    assert native["round_trip_gb_per_s"] == pytest.approx(2 * 8 * 512 / 50e-6 / 1e9)
    assert (native["dispatch_fraction_of_limit"], native["combine_fraction_of_limit"]) == (0.5, 0.8)
    assert (limit["round_trip_fraction_of_limit"], native["round_trip_fraction_of_limit"]) == (1.0, 0.5)
    assert baseline["combine_fraction_of_limit"] == pytest.approx(1 / 3)
    assert not [row for row in (failed, absent) if "round_trip_gb_per_s" in row]
    json.dumps([limit, native, baseline, failed, absent], allow_nan=False)
    assert not [name for row in compare([native]) for name in row.keys() - native.keys()]


def test_the_table_shows_what_varies_and_failures_but_not_what_cannot_run():
    records = [record for tokens in (1, 8) for record in compare(rows_of(workload_of(tokens)))]
    headings, cells = make_table(records)
    assert headings[:2] == ["tokens", "contender"]
    assert headings[-1] == "of push"
    assert {len(row) for row in cells} == {len(headings)}
    assert [row[:2] for row in cells] == [
        [tokens, name] for tokens in "18" for name in ("reference_push", "ep_a2a", "nccl_agrs", "deepep")
    ]
    native = dict(zip(headings, cells[1], strict=True))
    assert (native["of push"], native["host µs"]) == ("50.0%", "4.0/4.0")
    assert cells[3][2] == "FAILED"
    assert cells[2][headings.index("round trip µs")] == "100.0"
    assert reasons(records) == [
        "deepep failed (T = 1, 8): checking, rank 1: wrong [x]",
        "flashinfer unavailable (T = 1, 8): needs GPUs",
    ]
    assert constant_fields(records).startswith("ranks 2, hidden 256, topk 2, experts 4, quant none")


def test_a_bound_is_a_column_and_so_are_cold_times_where_any_was_taken() -> None:
    warm, native = rows_of(workload_of(8))[:2]
    bounded = rows_of(workload_of(8, max_sms=8))[1] | {"round_trip_cold_us": 61.5}
    headings, table = make_table([*compare([warm, native]), *compare([bounded])])
    assert headings[:3] == ["tokens", "max_sms", "contender"]
    assert [(row[1], row[headings.index("cold µs")]) for row in table] == [("0", ""), ("0", ""), ("8", "61.5")]
    assert "cold µs" not in make_table(compare([warm, native]))[0]


def shown(records: list[dict[str, Any]], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console, HEADER, records)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_row_has_all_figures_also_where_the_terminal_is_narrow():
    text = shown(compare(rows_of(workload_of(8))))
    for part in ("flashinfer unavailable (T = 8): needs GPUs", "wrong [x]"):
        assert part in text
    (line,) = [line for line in text.splitlines() if "ep_a2a" in line]
    assert line.split() == ["8", "ep_a2a", "20.0", "25.0", "50.0", "100.0", "4.0/4.0", "0.205/0.164", "50.0%"]


def test_on_cpu_it_is_a_functional_check():
    """No times, shares or rates, which say nothing there; the JSON rows have the raw times alone."""
    records = compare(rows_of(workload_of(8), "cpu"))
    text = shown(records[:3])
    assert text.startswith("Right: 3 of 3 results on 2 CPU processes.\nfunctional check")
    assert make_table(records[:3]) == (
        ["tokens", "contender", "result"],
        [["8", "reference_push", "right"], ["8", "ep_a2a", "right"], ["8", "nccl_agrs", "right"]],
    )
    for word in ("µs", "GB/s", "limit:", "of push", "%"):
        assert word not in text
    assert records[1]["round_trip_us"] > 0
    assert not [name for name in records[1] if "fraction" in name or "gb_per_s" in name]
    assert shown(records).startswith("Wrong: 1 of 4 results on 2 CPU processes; see below.")
    assert make_table(records)[1][3] == ["8", "deepep", "FAILED"]


def test_the_commit_is_that_of_this_package_alone(tmp_path, monkeypatch):
    """A virtual environment may lie inside the checkout of another project."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    package = tmp_path / ".venv" / "ep_a2a" / "__init__.py"
    package.parent.mkdir(parents=True)
    monkeypatch.setattr(report.ep_a2a, "__file__", str(package))
    assert report.commit() is None
    (tmp_path / "ep_a2a").mkdir()
    monkeypatch.setattr(report.ep_a2a, "__file__", str(tmp_path / "ep_a2a" / "__init__.py"))
    assert re.fullmatch(r"[0-9a-f]{10}(-dirty)?", report.commit() or "")


def test_the_header_says_where_numbers_come_from():
    header = describe("cpu")
    assert header["record"] == "header"
    assert header["note"] == CPU_NOTE
    for name in ("torch", "triton", "python", "command", "date", "ep_a2a"):
        assert header[name]
    json.dumps(header)


class MadeUpRunner(Runner):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.asked: list[tuple[int, tuple[str, ...]]] = []

    def run(self, workload: Workload, names: Any, settings: TimingSettings) -> list[dict[str, Any]]:
        self.asked.append((workload.max_sms, names))
        return [make_record(workload, "cpu", name, Status.OK) | times_of(1, 1, 2) for name in names]


def test_contenders_run_one_by_one_and_those_of_a_layer_together(tmp_path, capsys):
    names, path = ("reference_push", "ep_a2a"), tmp_path / "rows.jsonl"
    points = [workload_of(8), workload_of(8, max_sms=8), workload_of(8, intermediate=64)]
    runner = MadeUpRunner()
    header, records = measure(Sweep("cpu", points, names, TimingSettings()), runner, path)
    assert runner.asked == [*((bound, (name,)) for bound in (0, 8) for name in names), (0, names)]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [header, *records]
    said = capsys.readouterr().err
    assert said.splitlines()[::3] == ["1/6 T=8 reference_push: right", "4/6 T=8 max SMs=8 ep_a2a: right"]


def test_times_of_layers_are_medians_of_the_rounds() -> None:
    rounds = [{"layer_us": us, "experts_us": 1.0} for us in (10.0, 60.0, 40.0)]
    ends = {"least_us": 10.0, "most_us": 60.0, "rounds_us": [10.0, 60.0, 40.0]}
    assert over_rounds(rounds) == {"layer_us": 40.0, "experts_us": 1.0} | ends
    assert over_rounds(rounds[:1]) == rounds[0]
