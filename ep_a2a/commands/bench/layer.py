"""Times a whole MoE layer, gate to combine, over each transport, and the share of communication in it.

python -m ep_a2a.commands.bench.layer --ranks 4 --tokens 128 512 4096 --quant fp8_per_1x128

The layer is checked against the dense layer, then timed as CUDA graph replays, many layers in a graph. "compute" is
the same gate and experts on rows that lie ready; "communication" is the rest of the layer's time. Transports take turns
in each round; times are medians of the rounds, "least" and "most" those of the layer.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.bench.layer_model import Gate, check_layer, make_weights
from ep_a2a.commands.bench.layer_transports import TRANSPORTS, check_transports, unavailable
from ep_a2a.commands.bench.report import CPU_NOTE
from ep_a2a.commands.files import check_can_write, write_text
from ep_a2a.commands.measure.timing import TimingSettings, make_clock, median_us
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.errors import ConfigError
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing.launch import RankFailure, RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ep_a2a.testing.worker import RankContext

RUN_TIMEOUT_SECS = 500.0
COLUMNS = (
    *("tokens", "quant", "transport", "layer_us", "least_us", "most_us", "compute_us", "communication_us"),
    "communication_share",
)


class LayerBench:
    """Weights, checks and times of one workload's layer on this rank. All methods are collective.

    Args:
        context: this rank.
        workload: shapes of the layer.
        intermediate_dim: F, intermediate size of an expert.
        settings: numbers of runs; num_round_trips is the number of layers in a row.
    """

    def __init__(
        self, context: RankContext, workload: Workload, intermediate_dim: int, settings: TimingSettings
    ) -> None:
        self.context, self.workload, self.intermediate_dim = context, workload, intermediate_dim
        self._settings, self._rendezvous = settings, Rendezvous(context.group)
        self.weights = make_weights(workload, intermediate_dim, context)
        self.x = workload.inputs(context.rank, context.device).x

    def check(self, name: str, workload: Workload, gate: Gate, result: torch.Tensor) -> None:
        """Compares a batch's result with the dense layer; raises CheckFailedError."""
        check_layer(name, workload, gate, self.weights, self.context, result)

    def time(self, work: Callable[[], Any]) -> float:
        """Returns microseconds of one of many calls in a row: median of each rank, the slowest rank."""
        in_graph = self.context.device.type == "cuda"
        return median_us(work, make_clock(self.context), self._rendezvous, self._settings, in_graph=in_graph)

    def time_checked(self, work: Callable[[], Any], check: Callable[[Any], None]) -> float:
        """Returns the time of `work`, whose result is checked before and after."""
        check(work())
        layer_us = self.time(work)
        check(work())
        return layer_us


def run_layers(
    context: RankContext,
    workload: Workload,
    intermediate_dim: int,
    names: tuple[str, ...],
    settings: TimingSettings,
    num_rounds: int = 1,
) -> list[dict[str, Any]]:
    """Returns one row per transport, the same on all ranks. Collective.

    Each round times every transport once, since a machine's speed changes from minute to minute. `layer_us` and
    `compute_us` are medians of the rounds.

    Raises:
        CheckFailedError: a transport's layer is not the dense layer.
    """
    check_transports(names, workload)
    bench = LayerBench(context, workload, intermediate_dim, settings)
    gate = Gate(bench.x, bench.weights.router, workload.topk)
    reasons = {name: unavailable(name, workload, context.device) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    gate()
    with contextlib.ExitStack() as stack:
        transports = {
            name: stack.enter_context(contextlib.closing(TRANSPORTS[name](workload, gate, bench.weights, context)))
            for name in names
            if reasons[name] is None
        }
        for _ in range(num_rounds):
            for name, transport in transports.items():
                check = functools.partial(bench.check, name, workload, gate)
                layer_us = bench.time_checked(transport.run, check)
                times[name].append((layer_us, bench.time(transport.computation())))
    return [_row_of(name, workload, reasons[name], times[name]) for name in names]


def _row_of(name: str, workload: Workload, reason: str | None, times: list[tuple[float, float]]) -> dict[str, Any]:
    """Returns the row of a transport from its rounds' times of the layer and of the computation in it."""
    row: dict[str, Any] = {"tokens": workload.num_tokens, "quant": workload.quant_type, "transport": name}
    if reason is not None:
        return row | {"unavailable": reason}
    layers, computations = zip(*times)
    layer_us, compute_us = statistics.median(layers), statistics.median(computations)
    communication_us = layer_us - compute_us
    return row | {
        "layer_us": layer_us,
        "compute_us": compute_us,
        "communication_us": communication_us,
        "communication_share": communication_us / layer_us,
        "least_us": min(layers),
        "most_us": max(layers),
        "rounds_us": list(layers),
    }


def layer_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Returns a parser of shapes, timing and output; the defaults are DeepSeek-V3's layer."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=at_least(1), default=4, help="processes; more than GPUs share them")
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
    add("--output", type=Path, help="write the rows to this file, as lines of JSON")
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
    """Returns the options, with `timing` and one workload per number of tokens in `workloads`.

    Exits with an error before any process starts.
    """
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.device_count():
        parser.error("there is no GPU: --device cpu")
    try:
        check_can_write(options.output)
    except ConfigError as error:
        parser.error(f"--output: {error}")
    options.timing = TimingSettings(options.warmups, options.runs, options.layers, num_host_calls=0)
    options.workloads = [
        Workload(
            world_size=options.ranks,
            num_tokens=num_tokens,
            max_num_tokens=num_tokens,
            hidden_dim=options.hidden,
            topk=options.topk,
            num_experts=options.experts,
            quant_type=options.quant,
            layout="rank_major",
        )
        for num_tokens in options.tokens
    ]
    return options


def run_sweep(
    options: argparse.Namespace, columns: Sequence[str], function: Callable[..., list[dict[str, Any]]], *args: Any
) -> None:
    """Runs `function(context, workload, *args)` on all ranks for each workload; gives rank 0's rows as they come."""
    rows: list[dict[str, Any]] = []
    note = {"note": CPU_NOTE} if options.device == "cpu" else {}
    try:
        with RankPool(options.ranks, device=options.device, timeout_secs=RUN_TIMEOUT_SECS) as pool:
            note |= {"note": pool.note} if pool.note else {}
            for workload in options.workloads:
                new = [row | note for row in pool.run(function, workload, *args)[0]]
                sys.stdout.write(_json_lines(new))
                sys.stdout.flush()
                rows += new
                if options.output is not None:
                    write_text(options.output, _json_lines(rows), confirms=False)
    except RankFailure as failure:
        if failure.expected_error is None:
            raise
        sys.exit(f"error: {failure.expected_error}")
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    sys.stdout.write("\n".join([format_table(rows, columns), *note.values()]) + "\n")


def format_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """Returns rows as text; an unavailable row has its reason in place of numbers."""
    lines = [list(columns)]
    for row in rows:
        cells = [_format(row[column]) for column in columns if column in row]
        lines.append(cells + ([f"unavailable: {row['unavailable']}"] if "unavailable" in row else []))
    complete = [line for line in lines if len(line) == len(columns)]
    widths = [max(map(len, column)) for column in zip(*complete)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def _format(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.1f}"


def _json_lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = layer_parser("python -m ep_a2a.commands.bench.layer", __doc__.partition("\n")[0])
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=list(TRANSPORTS), help="which")
    parser.add_argument("--rounds", type=at_least(1), default=4, help="in each, every transport is timed once")
    options = parse_options(parser, arguments)
    run_sweep(
        options, COLUMNS, run_layers, options.intermediate, tuple(options.transports), options.timing, options.rounds
    )


if __name__ == "__main__":
    main()
