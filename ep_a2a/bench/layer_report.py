"""The command line and the output that the layer benchmarks share: JSON lines to a file, a table to the terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a.bench.timing import TimingSettings
from ep_a2a.bench.workload import Workload
from ep_a2a.testing.launch import RankPool

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

RUN_TIMEOUT_SECS = 500.0


def add_layer_options(parser: argparse.ArgumentParser) -> None:
    """Shapes, timing and output; the defaults are DeepSeek-V3's layer."""
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 4096], help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=256, help="over all ranks")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--quant", choices=("none", "fp8_per_1x128"), default="none", help="cast on the dispatch wire")
    parser.add_argument("--layers", type=int, default=10, help="layers in a row, in one CUDA graph")
    parser.add_argument("--warmups", type=int, default=5)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append one line per row to this file")


def layer_workload(options: argparse.Namespace, num_tokens: int) -> Workload:
    """What moves in one layer."""
    return Workload(
        world_size=options.ranks, num_tokens=num_tokens, max_num_tokens=num_tokens, hidden_dim=options.hidden,
        topk=options.topk, num_experts=options.experts, quant_type=options.quant, layout="rank_major",
    )  # fmt: skip


def timing_settings(options: argparse.Namespace) -> TimingSettings:
    """How often it is measured."""
    return TimingSettings(
        num_warmups=options.warmups, num_runs=options.runs, num_round_trips=options.layers, num_host_calls=0
    )


def run_sweep(
    options: argparse.Namespace,
    function: Callable[..., list[dict[str, Any]]],
    tasks: Sequence[tuple[Any, ...]],
    columns: Sequence[str],
) -> list[dict[str, Any]]:
    """Runs `function(context, *task)` on all ranks for each task; writes and shows rank 0's rows as they come."""
    rows: list[dict[str, Any]] = []
    with RankPool(options.ranks, device=options.device, timeout_secs=RUN_TIMEOUT_SECS) as pool:
        for task in tasks:
            new = pool.run(function, *task)[0]
            for row in new:
                _write_line(options.json, row)
            rows += new
    sys.stdout.write(format_table(rows, columns) + "\n")
    return rows


def format_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Rows as text; a row that could not be had gives its reason instead of numbers."""
    lines = [list(columns)]
    for row in rows:
        cells = [_format(row[column]) for column in columns if column in row]
        lines.append(cells + ([f"unavailable: {row['unavailable']}"] if "unavailable" in row else []))
    widths = [
        max((len(line[i]) for line in lines if len(line) == len(columns)), default=0) for i in range(len(columns))
    ]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _format(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) and abs(value) < 1 else (
        f"{value:.1f}" if isinstance(value, float) else str(value)
    )  # fmt: skip


def _write_line(path: Path | None, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if path is not None:
        with path.open("a") as file:
            file.write(line + "\n")
