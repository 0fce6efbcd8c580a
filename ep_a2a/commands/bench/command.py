"""Runs a sweep of round trips or layers, and reports it on the terminal and in files."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_a2a.commands import messages
from ep_a2a.commands.bench import contenders as known
from ep_a2a.commands.bench.layer import LayerWorkload
from ep_a2a.commands.bench.picture import plot_bench
from ep_a2a.commands.bench.report import compare, describe, reasons, show, shown_name, write_lines
from ep_a2a.commands.bench.runner import JoinedRunner, Runner, Status, main_us, run_sweep
from ep_a2a.commands.files import check_can_write, different_files
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload, make_workloads
from ep_a2a.commands.options import given, refuse
from ep_a2a.commands.plots import check_can_plot, dark_variant
from ep_a2a.commands.progress import Progress
from ep_a2a.commands.ranks import choose_device
from ep_a2a.errors import ConfigError, UnsupportedError
from ep_a2a.ops.sm_share import share_of
from ep_a2a.policy import LEAST_PROGRAMS
from ep_a2a.topology.gpu_share import ranks_per_gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    Record = dict[str, Any]

DEFAULT_RANKS = 2
"""On CPU, and with --shared-gpu."""
LAYER_OPTIONS = ("layers", "rounds", "intermediate", "micro_batches")
"""Options that say nothing without --layer."""
_ON_GPUS = tuple(name for name in known.CONTENDERS if name not in known.BETWEEN_NODES)
# In the interpreter a step of the op takes seconds, so its variants run only when named.
_ON_CPU = tuple(name for name in _ON_GPUS if not name.startswith(f"{known.NATIVE}_"))
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"hidden": (7168,), "topk": (8,), "experts": (256,), "intermediate": (2048,), "contenders": _ON_GPUS}
    | {"tokens": (1, 16, 32, 128, 512, 4096), "warmups": 20, "iterations": 50, "layers": 10},
    "cpu": {"hidden": (256,), "topk": (4,), "experts": (16,), "intermediate": (64,), "contenders": _ON_CPU}
    | {"tokens": (1, 4, 16), "warmups": 0, "iterations": 2, "layers": 1},
}
"""Values of options by kind of device: DeepSeek-V3 on GPUs, a small shape for the interpreter."""
LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"tokens": (8, 128, 1024, 4096), "warmups": 2, "iterations": 10, "layers": 4, "rounds": 4},
    "cpu": {"tokens": (4,), "iterations": 1},
}
"""Defaults that --layer changes."""
FIELDS = (
    *("ranks", "hidden", "topk", "experts", "dtype", "quant", "combine_quant", "layout", "routing"),
    *("gpus_per_node", "max_tokens", "tokens", "max_sms"),
)
"""Fields of a workload that options set. The last ones vary fastest: rows of one size under several bounds are
neighbours."""


def run(options: SimpleNamespace) -> bool:
    """Checks the options, then measures; returns what `execute` does.

    Args:
        options: of `ep-a2a bench` by name, None where not given.

    Raises:
        EpA2AError: what is asked for cannot be measured or written.
    """
    kind = choose_device(options.device.value)
    if not options.layer:
        refuse({name: getattr(options, name) for name in LAYER_OPTIONS}, "without --layer", "Say --layer, too.")
    if options.layer:
        refuse({"cold_cache": options.cold_cache or None}, "with --layer, whose layers flush the L2", "Leave it out.")
    if options.micro_batches:
        refuse({"contenders": options.contenders}, "with --micro-batches, which run this package's op", "Say one.")
    if kind == "cpu":
        refuse({"plot": options.plot}, "on CPU, whose times say nothing about GPUs", "Leave it out.")
    options = with_defaults(options, kind)
    if not options.micro_batches:
        known.check_names(options.contenders, known.LAYERS if options.layer else known.CONTENDERS)
    plot = options.plot
    check_can_write(options.output)
    different_files(options.output, plot, None if plot is None else dark_variant(plot))
    if plot is not None:
        check_can_plot(plot)
    if options.shared_gpu:
        require_shareable(kind)
    starts_ranks = not dist.is_torchelastic_launched()
    runner = Runner(kind, shared_gpu=options.shared_gpu) if starts_ranks else JoinedRunner(kind)
    with contextlib.closing(runner):
        options.ranks = ranks_of(options, kind, runner.world_size)
        workloads = workloads_of(options)
        if kind == "cuda" and runner.world_size is None:
            num_sms = torch.cuda.get_device_properties(0).multi_processor_count
            check_budgets(options.max_sms, options.ranks, runner.num_gpus, num_sms)
        return execute(runner, workloads, kind, options)


def with_defaults(options: SimpleNamespace, device: str) -> SimpleNamespace:
    """Returns the options with values for those that are not given."""
    values = vars(options) | DEFAULTS[device] | {"quant": ("fp8_per_1x128",), "layout": ("compact",), "rounds": 1}
    if any(options.gpus_per_node):
        values["contenders"] += tuple(name for name in known.BETWEEN_NODES if name not in known.ONLY_WHEN_NAMED)
    if options.layer:
        values |= LAYER_DEFAULTS[device] | {"layout": ("rank_major",), "contenders": known.LAYERS}
    if options.micro_batches:
        values["contenders"] = known.micro_batch_names(options.micro_batches)
    return SimpleNamespace(**values | given(vars(options)))


def ranks_of(options: SimpleNamespace, device: str, joined: int | None) -> tuple[int, ...]:
    """Returns the numbers of ranks: those of --ranks, else of torchrun's job, or one per GPU, or 2.

    Args:
        options: as `run` takes them. device: "cpu" or "cuda". joined: ranks of the job, None without one.

    Raises:
        ConfigError: --ranks is not the number of ranks that torchrun has started, or one would share with nobody.
    """
    usual = torch.cuda.device_count() if device == "cuda" and not options.shared_gpu else DEFAULT_RANKS
    ranks: tuple[int, ...] = options.ranks or (joined or usual,)
    if joined is not None and ranks != (joined,):
        raise ConfigError(f"--ranks {joined}, which torchrun has started", str(ranks), "Leave --ranks out.")
    if options.shared_gpu and min(ranks) < 2:
        raise ConfigError("--ranks of 2 or more with --shared-gpu", str(min(ranks)), "Raise --ranks.")
    return ranks


def workloads_of(options: SimpleNamespace) -> list[Workload]:
    """Returns the workloads of the command's options, which all have values."""
    values = {field: getattr(options, field) for field in FIELDS}
    if options.seed is not None:
        values["seed"] = (options.seed,)
    if not options.layer:
        return make_workloads(values)
    return make_workloads(values | {"intermediate": options.intermediate}, LayerWorkload)


def execute(runner: Runner, workloads: Sequence[Workload], device: str, options: SimpleNamespace) -> bool:
    """Runs the sweep and reports it, on the rank that shows results.

    Args:
        options: as `run` takes them, all with values.

    Returns:
        Whether no available contender raised or returned a wrong result.

    Raises:
        UnsupportedError: no contender can run here, so nothing was measured.
    """
    settings = TimingSettings(
        options.warmups, options.iterations, options.layers, cold_cache=options.cold_cache, num_rounds=options.rounds
    )
    output = options.output if runner.shows_results else None
    header = describe(device) if runner.shows_results else {}
    shared = runner.note(max(workload.ranks for workload in workloads))
    header |= {"note": shared} if shared else {}
    records: list[Record] = []
    if output is not None:
        write_lines(output, header, records)
    console = messages.notices()
    console.quiet |= not runner.shows_results
    with Progress("measuring", len(workloads) * len(options.contenders), console) as progress:
        sweep = run_sweep(
            workloads,
            options.contenders,
            settings,
            runner,
            lambda record: progress.end(_progress_text(record, device)),
            lambda workload, name: progress.begin(_part_text(workload.tokens, workload.max_sms, name, device)),
        )
        for of_workload in sweep:
            records += compare(of_workload, device)
            if output is not None:
                write_lines(output, header, records)
    if all(record["status"] == Status.UNAVAILABLE for record in records):
        remedy = "Name others by --contenders, or run this where they can run."
        raise UnsupportedError("a contender that can run here", "; ".join(reasons(records)), remedy)
    if runner.shows_results:
        if options.as_json:
            messages.print_json({"header": header, "rows": records})
        else:
            show(messages.output(), header, records)
        if options.plot is not None:
            plot_bench(records, options.plot, header)
        if output is not None:
            messages.confirm(output)
    return all(record["status"] in (Status.OK, Status.UNAVAILABLE) for record in records)


def _part_text(num_tokens: int, max_sms: int, name: str, device: str) -> str:
    bound = f" max SMs={max_sms}" if max_sms else ""
    return f"T={num_tokens}{bound} {shown_name(name, device)}"


def _progress_text(record: Record, device: str) -> str:
    found = record["status"]
    if found == Status.OK:
        found = "right" if device == "cpu" else f"{main_us(record):.1f} µs"
    return f"{_part_text(record['tokens'], record['max_sms'], record['contender'], device)}: {found}"


def require_shareable(device: str) -> None:
    """Checks that --shared-gpu can be had on "cpu" or "cuda": raises ConfigError without GPUs, or under torchrun."""
    if device != "cuda":
        raise ConfigError("GPUs with --shared-gpu", f"ranks on {device}", "Leave --shared-gpu out.")
    if dist.is_torchelastic_launched():
        remedy = "Start bench without torchrun, or leave --shared-gpu out and set CUDA_VISIBLE_DEVICES to one GPU."
        raise ConfigError("no torchrun with --shared-gpu, which starts ranks itself", "ranks of torchrun", remedy)


def check_budgets(budgets: Sequence[int], num_ranks: Sequence[int], num_gpus: int, num_sms: int) -> None:
    """Checks that every number of ranks fits on the GPUs with every budget, where ranks share GPUs.

    Args:
        budgets: of --max-sms, multiprocessors of each rank; 0 = the rank's share.
        num_ranks: of --ranks. num_gpus: that they use. num_sms: multiprocessors of one GPU.

    Raises:
        ConfigError: a budget is too small for a launch, or too large for all ranks of a GPU together.
        UnsupportedError: no budget would do.
    """
    for sharing in sorted({ranks_per_gpu(each, num_gpus) for each in num_ranks} - {0, 1}, reverse=True):
        most = share_of(num_sms, sharing, known.OPS_AT_ONCE)
        wrong = [budget for budget in budgets if budget and not LEAST_PROGRAMS <= budget <= most]
        if wrong:
            raise ConfigError(
                f"--max-sms from {LEAST_PROGRAMS} to {most}: {sharing} ranks share a GPU of {num_sms} multiprocessors",
                ", ".join(map(str, wrong)),
                f"Lower --max-sms to {most}, or start fewer --ranks; 0 takes the share.",
            )
