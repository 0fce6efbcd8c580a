"""Parses options and writes rows for the layer benchmarks: JSON lines to a file, a table to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.bench.environment import CPU_NOTE
from ep_a2a.commands.bench.timing import TimingSettings
from ep_a2a.commands.bench.workload import Workload
from ep_a2a.testing.launch import RankFailure, RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RUN_TIMEOUT_SECS = 500.0


def layer_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser of shapes, timing and output; the defaults are DeepSeek-V3's layer."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=at_least(1), default=4, help="processes, one per GPU")
    add("--device", choices=("cpu", "cuda"), default="cuda", help="times on CPU say nothing about GPUs")
    add("--tokens", type=at_least(1), nargs="+", default=[128, 512, 4096], help="tokens of each rank")
    add("--hidden", type=at_least(1), default=7168, help="hidden size")
    add("--intermediate", type=at_least(1), default=2048, help="intermediate size of an expert")
    add("--experts", type=at_least(1), default=256, help="over all ranks")
    add("--topk", type=at_least(1), default=8, help="experts per token")
    add("--quant", choices=("none", "fp8_per_1x128"), default="none", help="cast on the dispatch wire")
    add("--layers", type=at_least(1), default=10, help="layers in a row, in one CUDA graph")
    add("--warmups", type=at_least(0), default=5, help="untimed runs")
    add("--runs", type=at_least(1), default=20, help="timed runs")
    add("--json", type=Path, help="append one line per row to this file")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Returns a type for argparse: whole numbers from `least` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def parse_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options; exits with an error before any process starts."""
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    if options.device == "cuda" and options.ranks > num_gpus:
        parser.error(
            f"{options.ranks} ranks need as many GPUs, and there are {num_gpus}: lower --ranks, or --device cpu"
        )
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.resolve().parent} for --json")
    return options


def layer_workload(options: argparse.Namespace, num_tokens: int) -> Workload:
    """Returns the workload of one layer."""
    return Workload(
        world_size=options.ranks, num_tokens=num_tokens, max_num_tokens=num_tokens, hidden_dim=options.hidden,
        topk=options.topk, num_experts=options.experts, quant_type=options.quant, layout="rank_major",
    )  # fmt: skip


def timing_settings(options: argparse.Namespace) -> TimingSettings:
    """Returns the numbers of runs."""
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
    note = {"note": CPU_NOTE} if options.device == "cpu" else {}
    try:
        with RankPool(options.ranks, device=options.device, timeout_secs=RUN_TIMEOUT_SECS) as pool:
            for task in tasks:
                new = pool.run(function, *task)[0]
                for row in new:
                    _write_line(options.json, row | note)
                rows += new
    except RankFailure as failure:
        if failure.expected_error is None:
            raise
        sys.exit(f"error: {failure.expected_error}")
    sys.stdout.write("\n".join([format_table(rows, columns), *note.values()]) + "\n")
    return rows


def format_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Returns rows as text; an unavailable row has its reason in place of numbers."""
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
