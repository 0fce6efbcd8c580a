"""Columns, tables, JSON lines, markdown and pictures of the benchmark, from rows that are made up."""

import io
import json
import re
import subprocess
from typing import Any

import pytest
from rich.console import Console

from ep_a2a.commands.bench import report
from ep_a2a.commands.bench.picture import choose_x, make_lines, plot_bench
from ep_a2a.commands.bench.report import (
    CPU_NOTE,
    compare,
    constant_fields,
    describe,
    make_table,
    reasons,
    show,
    varying_fields,
)
from ep_a2a.commands.bench.runner import Runner, Status, make_record, run_sweep
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload

HEADER = {"record": "header", "device": "cuda", "torch": "2.13", "note": CPU_NOTE}


def workload_of(num_tokens: int, **changes: Any) -> Workload:
    values: dict[str, Any] = {
        "ranks": 2,
        "tokens": num_tokens,
        "max_tokens": num_tokens,
        "hidden": 256,
        "topk": 2,
        "experts": 4,
        "routing": "one_expert_per_rank",
    }
    return Workload(**{**values, **changes})


def times_of(dispatch: float, combine: float, round_trip: float, host: float | None = None) -> dict[str, Any]:
    us = {"dispatch": dispatch, "combine": combine, "round_trip": round_trip}
    found: dict[str, Any] = {f"{phase}_us": value for phase, value in us.items()}
    found |= {f"{phase}_p99_us": value * 2 for phase, value in us.items()}
    found |= {"round_trip_cold_us": None, "in_graph": host is not None}
    return found | ({"dispatch_host_us": host, "combine_host_us": host} if host is not None else {})


def timed(workload: Workload, name: str, times: dict[str, Any], **details: Any) -> dict[str, Any]:
    return make_record(workload, name, Status.OK, details=details) | times


def rows_of(workload: Workload) -> list[dict[str, Any]]:
    return [
        timed(workload, "reference_push", times_of(10, 20, 25, 3)),
        timed(workload, "ep_a2a", times_of(20, 25, 50, 4), dispatch_programs=3),
        timed(workload, "nccl_agrs", times_of(40, 60, 100)),
        make_record(workload, "nccl_all_to_all", Status.FAILED, "checking, rank 1: wrong [x]"),
        make_record(workload, "flashinfer", Status.UNAVAILABLE, "needs GPUs"),
    ]


def test_columns_are_worked_out_from_bytes_and_times():
    # every token goes to both ranks: one remote row per token
    limit, native, baseline, failed, absent = compare(rows_of(workload_of(8)))
    assert native["dispatch_bytes"] == native["combine_bytes"] == 8 * 512
    assert (native["dispatch_us"], native["dispatch_p99_us"], native["round_trip_us"]) == (20, 40, 50)
    assert native["dispatch_gb_per_s"] == pytest.approx(8 * 512 / 20e-6 / 1e9)
    assert native["round_trip_gb_per_s"] == pytest.approx(2 * 8 * 512 / 50e-6 / 1e9)
    assert (native["dispatch_fraction_of_limit"], native["combine_fraction_of_limit"]) == (0.5, 0.8)
    assert (limit["round_trip_fraction_of_limit"], native["round_trip_fraction_of_limit"]) == (1.0, 0.5)
    assert native["baselines_over_this"] == {"nccl_agrs": 2.0}
    assert baseline["baselines_over_this"] == {}
    assert (native["dispatch_host_us"], native["in_graph"], native["details"]) == (4, True, {"dispatch_programs": 3})
    assert "dispatch_host_us" not in baseline
    assert (failed["status"], absent["status"]) == ("failed", "unavailable")
    assert "round_trip_us" not in failed
    json.dumps([limit, native, baseline, failed, absent], allow_nan=False)


def test_without_the_limit_there_is_no_fraction():
    records = compare([timed(workload_of(1), "ep_a2a", times_of(1, 1, 2))])
    assert not [name for name in records[0] if "limit" in name]


def test_the_table_shows_what_varies_and_failures_but_not_what_cannot_run():
    records = [record for tokens in (1, 8) for record in compare(rows_of(workload_of(tokens)))]
    headings, cells, num_names = make_table(records)
    assert headings[:num_names] == ["T", "contender"]
    assert headings[-2:] == ["of push", "nccl_agrs ÷ this"]
    assert {len(row) for row in cells} == {len(headings)}
    assert [row[1] for row in cells] == ["reference_push", "ep_a2a", "nccl_agrs", "nccl_all_to_all"] * 2
    native = dict(zip(headings, cells[1], strict=True))
    assert (native["of push"], native["nccl_agrs ÷ this"], native["host µs"]) == ("50.0%", "2.00", "4.0/4.0")
    assert cells[3][2] == "FAILED"
    assert cells[2][headings.index("round trip µs")] == "100.0"
    assert reasons(records) == [
        "nccl_all_to_all failed (T = 1, 8): checking, rank 1: wrong [x]",
        "flashinfer unavailable (T = 1, 8): needs GPUs",
    ]
    assert "M = T" in constant_fields(records)
    assert "EP 2" in constant_fields(records)


def test_what_buffers_are_made_for_is_a_column_where_it_is_not_the_tokens():
    records = [r for bound in (8, 16) for r in compare(rows_of(workload_of(8, max_tokens=bound)))]
    assert varying_fields(records) == ["tokens", "max_tokens"]
    records = compare(rows_of(workload_of(8, max_tokens=16)))
    assert varying_fields(records) == ["tokens"]
    assert "M 16" in constant_fields(records)


def shown(records: list[dict[str, Any]], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console, HEADER, records)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_terminal_shows_all_columns_at_its_width():
    # narrow, as where output goes to a file; figures must not lose digits
    text = shown(compare(rows_of(workload_of(8))))
    for part in ("flashinfer unavailable (T = 8): needs GPUs", "wrong [x]", "100.0", "÷", "50.0%"):
        assert part in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    # each table names its rows
    assert text.count("│ nccl_agrs ") == text.count("contender") > 1
    assert shown(compare(rows_of(workload_of(8))), 200).count("contender") == 1


def test_on_cpu_it_is_a_functional_check():
    """No times, shares, rates or NCCL, which say nothing there; the JSON rows have the raw times alone."""
    rows = rows_of(workload_of(8))
    records = compare(rows[:3], "cpu")
    text = shown(records)
    assert text.startswith("Right: 3 of 3 results on 2 CPU processes.\nfunctional check")
    assert make_table(records) == (
        ["T", "contender", "result"],
        [["8", "reference_push", "right"], ["8", "ep_a2a", "right"], ["8", "gloo_agrs", "right"]],
        2,
    )
    for word in ("µs", "GB/s", "limit:", "of push", "%", "nccl", "÷"):
        assert word not in text
    assert records[1]["round_trip_us"] > 0
    assert not [name for name in records[1] if "fraction" in name or "gb_per_s" in name or "over_this" in name]
    assert {record["device"] for record in records} == {"cpu"}
    assert {record["device"] for record in compare(rows)} == {"cuda"}
    wrong = compare(rows, "cpu")
    assert shown(wrong).startswith("Wrong: 1 of 4 results on 2 CPU processes; see below.")
    assert make_table(wrong)[1][3] == ["8", "gloo_all_to_all", "FAILED"]
    assert reasons(wrong)[0].startswith("gloo_all_to_all failed")


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


def test_lines_of_the_picture_are_named_by_what_varies():
    records = [
        record
        for layout in ("compact", "rank_major")
        for tokens in (8, 1)
        for record in compare(rows_of(workload_of(tokens, layout=layout)))
    ]
    lines = make_lines(records)
    assert list(lines) == [
        f"{name}, layout {layout}"
        for layout in ("compact", "rank_major")
        for name in ("reference_push", "ep_a2a", "nccl_agrs")
    ]
    assert list(lines["reference_push, layout compact"].items()) == [(1, 25), (8, 25)]


class MadeUpRunner(Runner):
    """Remembers what it was asked for; fewer multiprocessors take longer."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.asked: list[tuple[str, int]] = []

    def run(self, workload: Workload, name: str, settings: TimingSettings) -> dict[str, Any]:
        self.asked.append((name, workload.max_sms))
        us = 10.0 if name == "reference_push" else 1000 / (workload.max_sms or 100)
        return timed(workload, name, times_of(us, us, 2 * us))


def records_of_bounds(tokens: int = 8) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    runner = MadeUpRunner()
    points = [workload_of(tokens, max_sms=bound) for bound in (0, 8, 32)]
    rows = run_sweep(points, ["reference_push", "ep_a2a"], TimingSettings(), runner)
    return [record for of_point in rows for record in compare(of_point)], runner.asked


def test_cold_times_are_a_column_where_any_was_taken() -> None:
    warm, native = rows_of(workload_of(8))[:2]
    records = compare([warm, native | {"round_trip_cold_us": 61.5}])
    assert [record["round_trip_cold_us"] for record in records] == [None, 61.5]
    headings, table, _ = make_table(records)
    assert [row[headings.index("cold µs")] for row in table] == ["", "61.5"]
    assert "cold µs" not in make_table(compare([warm, native]))[0]


def test_bounds_are_one_table():
    records, asked = records_of_bounds()
    assert asked == [(name, bound) for bound in (0, 8, 32) for name in ("reference_push", "ep_a2a")]
    assert [record["max_sms"] for record in records] == [0, 0, 8, 8, 32, 32]
    headings, cells, _ = make_table(records)
    assert headings[:3] == ["T", "max SMs", "contender"]
    assert [row[:3] for row in cells] == [
        ["8", bound, name] for bound in ("0", "8", "32") for name in ("reference_push", "ep_a2a")
    ]
    assert [row[headings.index("of push")] for row in cells] == [
        "100.0%",
        "100.0%",
        "100.0%",
        "8.0%",
        "100.0%",
        "32.0%",
    ]


def test_bounds_are_the_x_axis_where_nothing_else_varies(tmp_path):
    records, _ = records_of_bounds()
    assert choose_x(records) == "max_sms"
    assert make_lines(records) == {"reference_push": {0: 20, 8: 20, 32: 20}, "ep_a2a": {0: 20, 8: 250, 32: 62.5}}
    path = tmp_path / "bounds.svg"
    plot_bench(records, path, HEADER)
    text = path.read_text()
    for comment in ("bound on multiprocessors", "all", "32", "T 8, "):
        assert f">{comment}" in text
    more = records + records_of_bounds(16)[0]
    assert choose_x(more) == "tokens"
    names = ("reference_push", "ep_a2a")
    assert list(make_lines(more)) == [f"{name}, max SMs {bound}" for bound in (0, 8, 32) for name in names]


def test_the_header_says_where_numbers_come_from():
    header = describe("cpu")
    assert header["record"] == "header"
    assert header["note"] == CPU_NOTE
    for name in ("torch", "triton", "python", "command", "date", "ep_a2a"):
        assert header[name]
    json.dumps(header)
