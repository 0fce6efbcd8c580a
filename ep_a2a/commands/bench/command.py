"""Runs a sweep of round trips or layers, and reports it on the terminal and in files."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.commands import messages
from ep_a2a.commands.bench import contenders as known
from ep_a2a.commands.bench.report import compare, describe, reasons, show, write_lines
from ep_a2a.commands.bench.runner import JoinedRunner, Runner, Status, main_us
from ep_a2a.commands.files import check_can_write
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload, make_workloads
from ep_a2a.commands.options import given, refuse
from ep_a2a.commands.ranks import choose_device
from ep_a2a.errors import ConfigError, UnsupportedError

Record = dict[str, Any]

DEFAULT_RANKS = 2
"""On CPU."""
LAYER_OPTIONS = ("rounds", "intermediate", "micro_batches", "uneven")
"""Options that say nothing without --layer."""
ONE_NODE = tuple(name for name in known.CONTENDERS if name not in known.BETWEEN_NODES)
"""Contenders where all ranks are on one node."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"hidden": (7168,), "topk": (8,), "experts": (256,), "intermediate": (2048,)}
    | {"tokens": (1, 16, 32, 128, 512, 4096), "iterations": 50},
    "cpu": {"hidden": (256,), "topk": (4,), "experts": (16,), "intermediate": (64,)}
    | {"tokens": (1, 4, 16), "iterations": 2},
}
"""Values of options by kind of device: DeepSeek-V3 on GPUs, a small shape for the interpreter."""
LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"tokens": (8, 128, 1024, 4096), "iterations": 10, "rounds": 4},
    "cpu": {"tokens": (4,), "iterations": 1},
}
"""Defaults that --layer changes."""
FIELDS = (
    *("ranks", "hidden", "topk", "experts", "quant", "combine_quant", "layout", "routing", "gpus_per_node"),
    *("tokens", "max_sms"),
)
"""Options that are fields of a workload. The last ones vary fastest: rows of one size under several bounds are
neighbours."""


@dataclass(frozen=True)
class Sweep:
    """One bench on "cpu" or "cuda": each contender is measured at each workload."""

    device: str
    workloads: Sequence[Workload]
    contenders: tuple[str, ...]
    settings: TimingSettings


def run(options: SimpleNamespace) -> bool:
    """Checks the options, then measures and reports.

    Args:
        options: of `ep-a2a bench` by name, None where not given.

    Returns:
        Whether no available contender raised or returned a wrong result.

    Raises:
        EpA2AError: what is asked for cannot be measured or written.
    """
    device = choose_device(options.device.value)
    refuse_combinations(options)
    options = with_defaults(options, device)
    if not options.micro_batches:
        known.check_names(options.contenders, (*known.LAYERS, known.PACKED) if options.layer else known.CONTENDERS)
    check_can_write(options.output)
    joins = dist.is_torchelastic_launched()
    runner = JoinedRunner(device) if joins else Runner(device)
    with contextlib.closing(runner):
        sweep = sweep_of(options, device, runner)
        output = options.output if runner.shows_results else None
        header, records = measure(sweep, runner, output)
        if runner.shows_results:
            if options.as_json:
                messages.print_json({"header": header, "rows": records})
            else:
                show(messages.output(), header, records)
            if output is not None:
                messages.confirm(output)
    return all(record["status"] in (Status.OK, Status.UNAVAILABLE) for record in records)


def refuse_combinations(options: SimpleNamespace) -> None:
    """Raises ConfigError where options exclude each other."""
    if not options.layer:
        refuse({name: getattr(options, name) or None for name in LAYER_OPTIONS}, "without --layer", "Say --layer, too.")
    if options.micro_batches:
        refused = {"contenders": options.contenders, "uneven": options.uneven or None}
        refuse(refused, "with --micro-batches, which run this package's op on equal ranks", "Say one.")


def with_defaults(options: SimpleNamespace, device: str) -> SimpleNamespace:
    """Returns the options with values for those that are not given."""
    values = vars(options) | DEFAULTS[device] | {"quant": ("fp8_per_1x128",), "layout": ("compact",), "rounds": 1}
    values["contenders"] = ONE_NODE
    if any(options.gpus_per_node):
        values["contenders"] += tuple(name for name in known.BETWEEN_NODES if name not in known.ONLY_WHEN_NAMED)
    if options.layer:
        values |= LAYER_DEFAULTS[device] | {"layout": ("rank_major",), "contenders": known.LAYERS}
    if options.uneven:
        values |= {"tokens": (8192,) if device == "cuda" else (8,), "contenders": (*known.LAYERS, known.PACKED)}
    if options.micro_batches:
        values["contenders"] = known.micro_batch_names(options.micro_batches)
    return SimpleNamespace(**values | given(vars(options)))


def sweep_of(options: SimpleNamespace, device: str, runner: Runner) -> Sweep:
    """Returns what options, which all have values but --ranks and --seed, ask for.

    Raises:
        ConfigError: --ranks is not the number of ranks that torchrun has started.
        EpA2AError: nothing can move a workload.
    """
    usual = torch.cuda.device_count() if device == "cuda" else DEFAULT_RANKS
    joined = runner.world_size
    ranks: tuple[int, ...] = options.ranks or (joined or usual,)
    if joined is not None and ranks != (joined,):
        raise ConfigError(f"--ranks {joined}, which torchrun has started", str(ranks), "Leave --ranks out.")
    values = {field: getattr(options, field) for field in FIELDS} | {"ranks": ranks}
    if options.seed is not None:
        values["seed"] = (options.seed,)
    if options.layer:
        values |= {"intermediate": options.intermediate, "uneven": (options.uneven,)}
    workloads = make_workloads(values)
    num_warmups, num_in_a_row = (0, 1) if device == "cpu" else (2, 4) if options.layer else (20, 10)
    settings = TimingSettings(num_warmups, options.iterations, num_in_a_row, num_rounds=options.rounds)
    return Sweep(device, workloads, options.contenders, settings)


def measure(sweep: Sweep, runner: Runner, output: Path | None) -> tuple[Record, list[Record]]:
    """Runs a sweep; writes the header and the rows to `output` after each workload, and returns both.

    Contenders run one after another; those of a layer are all prepared first, and share weights.

    Raises:
        UnsupportedError: no contender can run here, so nothing was measured.
    """
    header = describe(sweep.device) if runner.shows_results else {}
    header |= runner.note(max(workload.ranks for workload in sweep.workloads))
    records: list[Record] = []
    console = messages.notices()
    console.quiet |= not runner.shows_results
    num_parts, num_done = len(sweep.workloads) * len(sweep.contenders), 0
    with console.status("measuring") as status:
        for workload in sweep.workloads:
            if output is not None:
                write_lines(output, header, records)
            found: list[Record] = []
            together = [sweep.contenders] if workload.intermediate else [(name,) for name in sweep.contenders]
            for names in together:
                status.update(f"measuring: {_part_text(workload, names[0])}")
                for record in runner.run(workload, names, sweep.settings):
                    num_done += 1
                    text = f"{_part_text(workload, record['contender'])}: {_result_text(record)}"
                    messages.note(f"{num_done}/{num_parts} {text}", console)
                    found.append(record)
            records += [record | runner.note(workload.ranks) for record in compare(found)]
    if output is not None:
        write_lines(output, header, records)
    if all(record["status"] == Status.UNAVAILABLE for record in records):
        remedy = "Name others by --contenders, or run this where they can run."
        raise UnsupportedError("a contender that can run here", "; ".join(reasons(records)), remedy)
    return header, records


def _part_text(workload: Workload, name: str) -> str:
    bound = f" max SMs={workload.max_sms}" if workload.max_sms else ""
    return f"T={workload.tokens}{bound} {name}"


def _result_text(record: Record) -> str:
    if record["status"] != Status.OK:
        return str(record["status"])
    return "right" if record["device"] == "cpu" else f"{main_us(record):.1f} µs"
