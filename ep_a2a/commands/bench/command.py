"""Runs a sweep, and reports it on the terminal and in files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_a2a.commands import messages
from ep_a2a.commands.bench.budgets import DEFAULT_SHARED_RANKS, check_budgets, require_several, require_shareable
from ep_a2a.commands.bench.contenders import (
    BETWEEN_NODES,
    CONTENDERS,
    NATIVE,
    ONLY_WHEN_NAMED,
    check_names,
    present_names,
)
from ep_a2a.commands.bench.launcher import make_runner, run_sweep
from ep_a2a.commands.bench.picture import plot_bench
from ep_a2a.commands.bench.report import JsonLines, describe, reasons, write_markdown
from ep_a2a.commands.bench.rows import Status, make_records, shown_name
from ep_a2a.commands.bench.view import show
from ep_a2a.commands.files import check_can_write, different_files
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Sweep
from ep_a2a.commands.options import given
from ep_a2a.commands.plotting import check_can_plot, dark_variant
from ep_a2a.commands.progress import Progress
from ep_a2a.commands.ranks import choose_device
from ep_a2a.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ep_a2a.commands.bench.launcher import Runner
    from ep_a2a.commands.bench.rows import Row
    from ep_a2a.commands.measure.workload import Workload


@dataclass(frozen=True)
class Defaults:
    """Defaults of the options for one kind of device; num_ranks None takes all GPUs."""

    num_ranks: int | None
    contenders: tuple[str, ...]
    num_tokens: tuple[int, ...]
    hidden_dim: int
    topk: int
    num_experts: int
    quant_type: str
    timing: TimingSettings


_ON_GPUS = tuple(name for name in CONTENDERS if name not in (*BETWEEN_NODES, *ONLY_WHEN_NAMED))
# In the interpreter a step of the op takes seconds, so its variants run only when named.
_ON_CPU = tuple(name for name in _ON_GPUS if not name.startswith(f"{NATIVE}_"))

DEFAULTS = {
    "cuda": Defaults(None, _ON_GPUS, (1, 16, 32, 128, 512, 4096), 7168, 8, 256, "fp8_per_1x128", TimingSettings()),
    "cpu": Defaults(2, _ON_CPU, (1, 4, 16), 256, 4, 16, "fp8_per_1x128", TimingSettings(0, 2, 1, 0)),
}
"""Defaults by kind of device: DeepSeek-V3 on GPUs, a small shape for the interpreter."""


def run(options: dict[str, Any]) -> bool:
    """Checks the options, then measures; returns what `execute` does.

    Args:
        options: of `ep-a2a bench` by parameter, None where not given.

    Raises:
        EpA2AError: what is asked for cannot be measured or written.
    """
    kind = choose_device(options["device"].value)
    shared = options["shared_gpu"]
    if shared:
        require_shareable(kind, joined=dist.is_torchelastic_launched())
    defaults = DEFAULTS[kind]
    usual = defaults.contenders + (BETWEEN_NODES if any(options["gpus_per_node"]) else ())
    names = usual if options["contenders"] is None else present_names(options["contenders"])
    check_names(names)
    output, markdown, plot = (options[name] for name in ("output", "markdown", "plot"))
    for path in (output, markdown):
        check_can_write(path)
    different_files(output, markdown, plot, None if plot is None else dark_variant(plot))
    if plot is not None:
        check_can_plot(plot)
    num_runs = options["iterations"] or defaults.timing.num_runs
    settings = replace(defaults.timing, num_runs=num_runs, cold_cache=options["cold_cache"])
    with make_runner(kind, shared_gpu=shared) as runner:
        sweep = sweep_of(options, kind, runner.world_size)
        if kind == "cuda" and runner.world_size is None:
            check_budgets(sweep.max_sms, sweep.world_size, runner.num_gpus, multiprocessors())
        return execute(
            runner,
            sweep,
            names,
            settings,
            kind,
            as_json=options["as_json"],
            output=output,
            plot=plot,
            markdown=markdown,
        )


def sweep_of(options: dict[str, Any], device: str, joined: int | None) -> Sweep:
    """Returns the sweep of the command's options on a kind of device; joined: ranks of the job, None without one."""
    defaults = DEFAULTS[device]
    default_ranks = DEFAULT_SHARED_RANKS if options["shared_gpu"] else joined or defaults.num_ranks
    ranks = requested_ranks(options["ranks"], default_ranks, is_joined=joined is not None)
    if options["shared_gpu"]:
        require_several(ranks)
    return Sweep(
        world_size=ranks,
        hidden_dim=options["hidden"] or (defaults.hidden_dim,),
        topk=options["topk"] or (defaults.topk,),
        num_experts=options["experts"] or (defaults.num_experts,),
        dtype=options["dtype"],
        quant_type=options["quant"] or (defaults.quant_type,),
        combine_quant=options["combine_quant"],
        layout=options["layout"],
        routing=options["routing"],
        max_num_tokens=options["max_tokens"],
        num_tokens=options["tokens"] or defaults.num_tokens,
        max_sms=options["max_sms"],
        gpus_per_node=options["gpus_per_node"],
        **given({"seed": options["seed"]}),
    )


def execute(
    runner: Runner,
    sweep: Sweep,
    names: Sequence[str],
    settings: TimingSettings,
    device: str,
    *,
    as_json: bool = False,
    output: Path | None = None,
    plot: Path | None = None,
    markdown: Path | None = None,
) -> bool:
    """Runs the sweep and reports it, on the rank that shows results.

    Returns:
        Whether no available contender raised or returned a wrong result.

    Raises:
        UnsupportedError: no contender can run here, so nothing was measured.
    """
    points = sweep.points()
    header = describe(device) if runner.shows_results else {}
    shared = runner.note(max(point.world_size for point in points))
    header |= {"note": shared} if shared else {}
    lines = JsonLines(output, header) if output is not None and runner.shows_results else None
    records: list[dict[str, Any]] = []
    progress_console = messages.notices()
    progress_console.quiet |= not runner.shows_results
    with Progress("measuring", len(points) * len(names), progress_console) as progress:
        rows_of_points = run_sweep(
            points,
            names,
            settings,
            runner,
            lambda row: progress.end(_progress_text(row, device)),
            lambda workload, name: progress.begin(_part_text(workload, name, device)),
        )
        for rows in rows_of_points:
            records += make_records(rows, device)
            if lines is not None:
                lines.append(records[-len(rows) :])
    _check_that_something_ran(records)
    if runner.shows_results:
        if as_json:
            messages.print_json({"header": header, "rows": records})
        else:
            show(messages.output(), header, records)
        if markdown is not None:
            write_markdown(markdown, header, records)
        if plot is not None:
            plot_bench(records, plot, header)
        if output is not None:
            messages.confirm(output)
    return all(record["status"] in (Status.OK, Status.UNAVAILABLE) for record in records)


def _part_text(workload: Workload, name: str, device: str) -> str:
    bound = f" max SMs={workload.max_sms}" if workload.max_sms else ""
    return f"T={workload.num_tokens}{bound} {shown_name(name, device)}"


def _progress_text(row: Row, device: str) -> str:
    found = row.status.value
    if row.timing is not None:
        found = "right" if device == "cpu" else f"{row.timing.round_trip.p50_us:.1f} µs"
    return f"{_part_text(row.workload, row.contender, device)}: {found}"


def _check_that_something_ran(records: Sequence[dict[str, Any]]) -> None:
    """Raises UnsupportedError where every contender was unavailable."""
    if all(record["status"] == Status.UNAVAILABLE for record in records):
        raise UnsupportedError(
            "a contender that can run here",
            "; ".join(reasons(records)),
            "Name others by --contenders, or run this where they can run.",
        )


def multiprocessors() -> int:
    """Returns the number of multiprocessors of the GPU with the fewest."""
    gpus = range(torch.cuda.device_count())
    return min(int(torch.cuda.get_device_properties(gpu).multi_processor_count) for gpu in gpus)


def requested_ranks(named: tuple[int, ...] | None, default: int | None, *, is_joined: bool) -> tuple[int, ...]:
    """Returns the numbers of ranks to measure: those of --ranks, else of the job, or one per GPU.

    Raises:
        ConfigError: --ranks is not the number of ranks that torchrun has started.
    """
    requested = named or (default or torch.cuda.device_count(),)
    if is_joined and requested != (default,):
        raise ConfigError(f"--ranks {default}, which torchrun has started", str(named), "Leave --ranks out.")
    return requested
