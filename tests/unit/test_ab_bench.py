"""The comparison of two checkouts: what it hands on, in which order, and how it tells cases apart."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tools import ab_bench

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def row_of(max_sms: int, us: float) -> dict[str, Any]:
    return {
        "record": "row",
        "contender": "ep_a2a",
        "world_size": 2,
        "num_tokens": 16,
        "layout": "rank_major",
        "max_sms": max_sms,
        "round_trip_us": us,
        "round_trip_cold_us": 2 * us,
        "note": "2 ranks share 1 GPU: times are not those of NVLink",
    }


def test_a_shared_gpu_is_handed_on_and_checkouts_alternate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def run_bench(folder: Path, arguments: list[str]) -> list[dict[str, Any]]:
        asked.append((folder.name, arguments))
        return [row_of(max_sms, us * (2 if folder.name == "new" else 1)) for max_sms, us in ((8, 40.0), (24, 10.0))]

    monkeypatch.setattr(ab_bench, "run_bench", run_bench)
    options = ["--shared-gpu", "--max-sms", "8,24"]
    rows = tmp_path / "rows.jsonl"
    places = [str(tmp_path / name) for name in ("old", "new")]
    monkeypatch.setattr(sys, "argv", ["ab_bench", *places, "--rounds", "2", "--json", str(rows), "--", *options])
    assert ab_bench.main() == 1
    # both compile first, one behind the other, since they share the GPU
    assert asked == [(name, options) for name in ("old", "new", "old", "new", "new", "old")]
    lines = capsys.readouterr().out.splitlines()[1:]
    figures = [("max_sms=8" in line, "round_trip_cold_us" in line) for line in lines]
    assert figures == [(True, False), (True, True), (False, False), (False, True)]
    assert all("+100.0%" in line for line in lines)
    assert rows.read_text().count("2 ranks share 1 GPU") == 8


def test_cases_of_other_shapes_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"old": {1024: 10.0, 7168: 100.0}, "new": {1024: 50.0, 7168: 100.0}}
    rows = [
        row_of(0, us) | {"hidden_dim": hidden, "checkout": name}
        for name, by_hidden in times.items()
        for hidden, us in by_hidden.items()
    ]
    assert ab_bench.report(rows, 2.0) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ["+400.0%" in line for line in lines if "hidden_dim=1024" in line] == [True, True]
    assert ["+0.0%" in line for line in lines if "hidden_dim=7168" in line] == [True, True]


def test_nothing_to_compare_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert ab_bench.report([], 2.0) == 1
    assert "nothing was compared" in capsys.readouterr().out
