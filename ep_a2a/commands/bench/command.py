"""Runs a sweep of round trips or layers, and reports it on the terminal and in files."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ep_a2a.commands import messages
from ep_a2a.commands.bench.contenders import (
    BETWEEN_NODES,
    CONTENDERS,
    LAYERS,
    NATIVE,
    ONLY_WHEN_NAMED,
    OPS_AT_ONCE,
    SCHEDULES,
    check_names,
    present_names,
)
from ep_a2a.commands.bench.layer import LayerWorkload
from ep_a2a.commands.bench.picture import plot_bench
from ep_a2a.commands.bench.report import JsonLines, compare, describe, reasons, show, shown_name, write_markdown
from ep_a2a.commands.bench.runner import Status, make_runner, run_sweep
from ep_a2a.commands.files import check_can_write, different_files
from ep_a2a.commands.measure.timing import TimingSettings
from ep_a2a.commands.measure.workload import Workload, make_workloads
from ep_a2a.commands.options import given, refuse
from ep_a2a.commands.plots import check_can_plot, dark_variant
from ep_a2a.commands.progress import Progress
from ep_a2a.commands.ranks import choose_device
from ep_a2a.errors import ConfigError, UnsupportedError
from ep_a2a.ops.gpu_share import share_of
from ep_a2a.topology.gpu_share import ranks_per_gpu
from ep_a2a.tuning.policy import LEAST_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import SimpleNamespace

    from ep_a2a.commands.bench.runner import Runner

    Record = dict[str, Any]

DEFAULT_SHARED_RANKS = 2
"""Ranks of --shared-gpu without --ranks."""
DEFAULT_COMM_SMS = 24
"""Multiprocessors of ops beside computation without --comm-sms."""
LAYER_OPTIONS = ("schedules", "intermediate", "comm_sms", "traces")
"""Options that say nothing without --layer."""


class Defaults(NamedTuple):
    """Defaults of the options for one kind of device; num_ranks None takes all GPUs."""

    num_ranks: int | None
    contenders: tuple[str, ...]
    num_tokens: tuple[int, ...]
    hidden_dim: int
    topk: int
    num_experts: int
    timing: TimingSettings
    quant_type: str = "fp8_per_1x128"
    layout: str = "compact"
    intermediate_dim: int = 2048


_ON_GPUS = tuple(name for name in CONTENDERS if name not in (*BETWEEN_NODES, *ONLY_WHEN_NAMED))
# In the interpreter a step of the op takes seconds, so its variants run only when named.
_ON_CPU = tuple(name for name in _ON_GPUS if not name.startswith(f"{NATIVE}_"))

DEFAULTS = {
    "cuda": Defaults(None, _ON_GPUS, (1, 16, 32, 128, 512, 4096), 7168, 8, 256, TimingSettings()),
    "cpu": Defaults(2, _ON_CPU, (1, 4, 16), 256, 4, 16, TimingSettings(0, 2, 1, 0)),
}
"""Defaults by kind of device: DeepSeek-V3 on GPUs, a small shape for the interpreter."""
LAYER_DEFAULTS = {
    "cuda": DEFAULTS["cuda"]._replace(num_tokens=(128, 512, 4096), timing=TimingSettings(5, 20, 10, 0, num_rounds=4)),
    "cpu": DEFAULTS["cpu"]._replace(
        num_tokens=(4,), intermediate_dim=64, timing=TimingSettings(0, 1, 1, 0, num_rounds=1)
    ),
}
"""The same with --layer."""


def defaults_of(device: str, *, layer: bool) -> Defaults:
    """Returns the defaults of round trips, or of layers."""
    if not layer:
        return DEFAULTS[device]
    return LAYER_DEFAULTS[device]._replace(contenders=LAYERS, quant_type="none", layout="rank_major")


def run(options: SimpleNamespace) -> bool:
    """Checks the options, then measures; returns what `execute` does.

    Args:
        options: of `ep-a2a bench` by name, None where not given.

    Raises:
        EpA2AError: what is asked for cannot be measured or written.
    """
    kind = choose_device(options.device.value)
    if options.shared_gpu:
        require_shareable(kind, joined=dist.is_torchelastic_launched())
    if not options.layer:
        refuse({name: getattr(options, name) for name in LAYER_OPTIONS}, "without --layer", "Say --layer, too.")
    defaults = defaults_of(kind, layer=options.layer)
    names = names_of(options, defaults)
    plot = options.plot
    for path in (options.output, options.markdown):
        check_can_write(path)
    different_files(options.output, options.markdown, plot, None if plot is None else dark_variant(plot))
    if plot is not None:
        check_can_plot(plot)
    given_runs = {
        "num_warmups": options.warmups,
        "num_runs": options.iterations,
        "num_round_trips": options.layers,
        "num_rounds": options.rounds,
    }
    settings = replace(defaults.timing, **given(given_runs), cold_cache=options.cold_cache)
    with contextlib.closing(make_runner(kind, shared_gpu=options.shared_gpu)) as runner:
        workloads = workloads_of(options, kind, runner.world_size)
        if kind == "cuda" and runner.world_size is None:
            num_ranks = [workload.world_size for workload in workloads]
            check_budgets([workload.max_sms for workload in workloads], num_ranks, runner.num_gpus, multiprocessors())
        return execute(runner, workloads, names, settings, kind, options)


def names_of(options: SimpleNamespace, defaults: Defaults) -> tuple[str, ...]:
    """Returns the contenders that are asked for.

    Raises:
        UnknownNameError: there is none of a name, or it does no layers.
    """
    if options.schedules is not None:
        check_names(options.schedules, dict.fromkeys(name.partition("/")[0] for name in SCHEDULES), "schedules")
        refuse({"contenders": options.contenders}, "with --schedules, which run this package's op", "Say one.")
        return tuple(name for each in options.schedules for name in SCHEDULES if name.startswith(f"{each}/"))
    if options.contenders is None:
        return defaults.contenders + (BETWEEN_NODES if any(options.gpus_per_node) else ())
    names = present_names(options.contenders)
    check_names(names, LAYERS if options.layer else CONTENDERS)
    return names


def workloads_of(options: SimpleNamespace, device: str, joined: int | None) -> list[Workload]:
    """Returns the workloads of the command's options on a kind of device.

    The number of tokens varies fast, and the bound on multiprocessors fastest: its rows are neighbours.

    Args:
        options: as `run` takes them. device: "cpu" or "cuda". joined: ranks of torchrun's job, None without one.
    """
    defaults = defaults_of(device, layer=options.layer)
    default_ranks = DEFAULT_SHARED_RANKS if options.shared_gpu else joined or defaults.num_ranks
    ranks = requested_ranks(options.ranks, default_ranks, is_joined=joined is not None)
    if options.shared_gpu:
        require_several(ranks)
    values: dict[str, Sequence[Any]] = {
        "world_size": ranks,
        "hidden_dim": options.hidden or (defaults.hidden_dim,),
        "topk": options.topk or (defaults.topk,),
        "num_experts": options.experts or (defaults.num_experts,),
        "dtype": options.dtype,
        "quant_type": options.quant or (defaults.quant_type,),
        "combine_quant": options.combine_quant,
        "layout": options.layout or (defaults.layout,),
        "routing": options.routing,
        "gpus_per_node": options.gpus_per_node,
        "max_num_tokens": options.max_tokens,
        "num_tokens": options.tokens or defaults.num_tokens,
        "max_sms": options.max_sms,
    }
    if options.seed is not None:
        values["seed"] = (options.seed,)
    if not options.layer:
        return make_workloads(values)
    values["intermediate_dim"] = options.intermediate or (defaults.intermediate_dim,)
    comm_sms = DEFAULT_COMM_SMS if options.comm_sms is None else options.comm_sms
    values |= {"comm_sms": (comm_sms if options.schedules else 0,), "traces": (options.traces,)}
    return make_workloads(values, LayerWorkload)


def execute(
    runner: Runner,
    workloads: Sequence[Workload],
    names: Sequence[str],
    settings: TimingSettings,
    device: str,
    options: SimpleNamespace,
) -> bool:
    """Runs the sweep and reports it, on the rank that shows results.

    Args:
        options: as `run` takes them; of them as_json, output, plot and markdown.

    Returns:
        Whether no available contender raised or returned a wrong result.

    Raises:
        UnsupportedError: no contender can run here, so nothing was measured.
    """
    output, plot, markdown = options.output, options.plot, options.markdown
    header = describe(device) if runner.shows_results else {}
    shared = runner.note(max(workload.world_size for workload in workloads))
    header |= {"note": shared} if shared else {}
    lines = JsonLines(output, header) if output is not None and runner.shows_results else None
    records: list[Record] = []
    progress_console = messages.notices()
    progress_console.quiet |= not runner.shows_results
    with Progress("measuring", len(workloads) * len(names) * settings.num_rounds, progress_console) as progress:
        sweep = run_sweep(
            workloads,
            names,
            settings,
            runner,
            lambda record: progress.end(_progress_text(record, device)),
            lambda workload, name: progress.begin(_part_text(workload.num_tokens, workload.max_sms, name, device)),
        )
        for of_workload in sweep:
            compared = compare(of_workload, device)
            records += compared
            if lines is not None:
                lines.append(compared)
    if all(record["status"] == Status.UNAVAILABLE for record in records):
        remedy = "Name others by --contenders, or run this where they can run."
        raise UnsupportedError("a contender that can run here", "; ".join(reasons(records)), remedy)
    if runner.shows_results:
        if options.as_json:
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


def _part_text(num_tokens: int, max_sms: int, name: str, device: str) -> str:
    bound = f" max SMs={max_sms}" if max_sms else ""
    return f"T={num_tokens}{bound} {shown_name(name, device)}"


def _progress_text(record: Record, device: str) -> str:
    found = record["status"]
    if found == Status.OK:
        us = record["layer_us" if "layer_us" in record else "round_trip_us"]
        found = "right" if device == "cpu" else f"{us:.1f} µs"
    return f"{_part_text(record['num_tokens'], record['max_sms'], record['contender'], device)}: {found}"


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


def require_shareable(device: str, *, joined: bool) -> None:
    """Checks that --shared-gpu can be had.

    Args:
        device: "cpu" or "cuda". joined: whether torchrun has started the ranks.

    Raises:
        ConfigError: there is no GPU, or ranks have GPUs already.
    """
    if device != "cuda":
        raise ConfigError("GPUs with --shared-gpu", f"ranks on {device}", "Leave --shared-gpu out.")
    if joined:
        remedy = "Start bench without torchrun, or leave --shared-gpu out and set CUDA_VISIBLE_DEVICES to one GPU."
        raise ConfigError("no torchrun with --shared-gpu, which starts ranks itself", "ranks of torchrun", remedy)


def require_several(num_ranks: Sequence[int]) -> None:
    """Raises ConfigError where --shared-gpu has a rank that would share with nobody."""
    if min(num_ranks) < 2:
        raise ConfigError("--ranks of 2 or more with --shared-gpu", str(min(num_ranks)), "Raise --ranks.")


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
        most = share_of(num_sms, sharing, OPS_AT_ONCE)
        wrong = [budget for budget in dict.fromkeys(budgets) if budget and not LEAST_PROGRAMS <= budget <= most]
        if wrong:
            raise ConfigError(
                f"--max-sms from {LEAST_PROGRAMS} to {most}: {sharing} ranks share a GPU of {num_sms} multiprocessors",
                ", ".join(map(str, wrong)),
                f"Lower --max-sms to {most}, or start fewer --ranks; 0 takes the share.",
            )
