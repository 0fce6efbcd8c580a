"""Times how much of a MoE layer's communication is exposed, one after another and beside computation.

python -m ep_a2a.commands.bench.overlap --ranks 4 --tokens 4096 --quant fp8_per_1x128 --comm-sms 24 --traces out/

Two schedules: "micro_batches" splits the tokens over two ops, "shared_expert" has a dense expert to run beside combine.
Each is timed as CUDA graph replays in turn and overlapped; exposed = layer - the same computation alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ep_a2a.commands.bench import overlap_schedules as schedules
from ep_a2a.commands.bench.layer import LayerBench, at_least, layer_parser, parse_options, run_sweep
from ep_a2a.commands.bench.layer_transports import check_transports
from ep_a2a.commands.bench.overlap_schedules import Batch, Lanes, SharedExpert
from ep_a2a.commands.measure.timing import TimingSettings, capture, make_clock
from ep_a2a.errors import ConfigError
from ep_a2a.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

COLUMNS = ("tokens", "quant", "schedule", "variant", "comm_sms", "layer_us", "compute_us", "exposed_us")
SHARED_SEED = 78
NUM_TRACED = 3
"""Layers in a trace."""


@dataclass(frozen=True)
class OverlapSettings:
    """Schedules and how to run them.

    Attributes:
        schedules: out of SCHEDULES.
        comm_sms: multiprocessors of the ops where computation runs beside them; 0 = no bound.
        intermediate_dim: F, of routed and shared experts.
        timing: numbers of runs.
        traces: folder for Chrome traces of rank 0, `SCHEDULE_VARIANT_TOKENS.json.gz`; None for none.
    """

    schedules: tuple[str, ...]
    comm_sms: int
    intermediate_dim: int
    timing: TimingSettings
    traces: Path | None


class Schedule(NamedTuple):
    """One schedule, ready to run.

    Attributes:
        batches: the ops in it.
        compute: its computation alone.
        variants: its work by name of the variant.
        check: compares the result of a variant with the dense layer.
    """

    batches: list[Batch]
    compute: Callable[[], Any]
    variants: Mapping[str, Callable[[], Any]]
    check: Callable[[Any], None]


def run_overlap(context: RankContext, workload: Workload, settings: OverlapSettings) -> list[dict[str, Any]]:
    """Returns one row per schedule and variant, the same on all ranks. Collective.

    Raises:
        ConfigError: two micro-batches cannot share the tokens.
        CheckFailedError: a variant's result is not the dense layer's.
    """
    check_transports((), workload)
    bench = LayerBench(context, workload, settings.intermediate_dim, settings.timing)
    lanes, rows = Lanes(context.device, settings.comm_sms), []
    for name in settings.schedules:
        with Arena(context.group, context.device) as arena:
            rows += _run_schedule(name, _MAKERS[name](bench, lanes, arena), bench, settings)
    return rows


def _run_schedule(name: str, schedule: Schedule, bench: LayerBench, settings: OverlapSettings) -> list[dict[str, Any]]:
    num_tokens, rows = bench.workload.num_tokens, []
    compute_us = bench.time(schedule.compute)
    for variant, work in schedule.variants.items():
        layer_us = bench.time_checked(work, schedule.check)
        if settings.traces is not None:
            write_trace(work, bench.context, settings.traces / f"{name}_{variant}_{num_tokens}.json.gz")
        rows.append(
            {
                "tokens": num_tokens,
                "quant": bench.workload.quant_type,
                "schedule": name,
                "variant": variant,
                "comm_sms": settings.comm_sms,
                "layer_us": layer_us,
                "compute_us": compute_us,
                "exposed_us": layer_us - compute_us,
            }
        )
    for batch in schedule.batches:
        batch.close()
    return rows


def _micro_batches(bench: LayerBench, lanes: Lanes, arena: Arena) -> Schedule:
    num_tokens = bench.workload.num_tokens
    if num_tokens % 2:
        raise ConfigError("an even number of tokens for two micro-batches", str(num_tokens))
    half = replace(bench.workload, num_tokens=num_tokens // 2, max_num_tokens=num_tokens // 2)
    batches = [
        Batch(half, x.contiguous(), bench.weights, bench.context, arena, index)
        for index, x in enumerate(bench.x.chunk(2))
    ]

    def check(results: list[torch.Tensor]) -> None:
        for batch, result in zip(batches, results, strict=True):
            bench.check("micro_batches", half, batch.gate, result)

    computes = [batch.computation() for batch in batches]

    def compute() -> None:
        for each in computes:
            each()

    variants = {
        "in_turn": partial(schedules.batches_in_turn, batches),
        "overlapped": partial(schedules.batches_overlapped, batches, lanes),
    }
    return Schedule(batches, compute, variants, check)


def _shared_expert(bench: LayerBench, lanes: Lanes, arena: Arena) -> Schedule:
    workload, x, device = bench.workload, bench.x, bench.context.device
    batch = Batch(workload, x, bench.weights, bench.context, arena, 0)
    hidden, width = workload.hidden_dim, bench.intermediate_dim
    generator = torch.Generator(device).manual_seed(SHARED_SEED)
    drawn = [
        torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) / shape[1] ** 0.5
        for shape in ((2 * width, hidden), (hidden, width))
    ]
    shared = SharedExpert(x, *drawn)

    def check(result: torch.Tensor) -> None:
        bench.check("shared_expert", workload, batch.gate, result.float() - shared().float())

    routed = batch.computation()

    def compute() -> torch.Tensor:
        return routed()[: workload.num_tokens] + shared()

    variants = {
        "in_turn": partial(schedules.shared_in_turn, batch, shared),
        "between": partial(schedules.shared_between, batch, shared),
        "beside": partial(schedules.shared_beside, batch, shared, lanes),
    }
    return Schedule([batch], compute, variants, check)


_MAKERS = {"micro_batches": _micro_batches, "shared_expert": _shared_expert}
SCHEDULES = tuple(_MAKERS)


def write_trace(layer: Callable[[], Any], context: RankContext, path: Path) -> None:
    """Writes a Chrome trace of a few layers, replayed from a CUDA graph on a GPU, by rank 0. Collective."""
    from torch.profiler import ProfilerActivity, profile

    def work() -> None:
        for _ in range(NUM_TRACED):
            layer()

    on_gpu = context.device.type == "cuda"
    run = capture(work, work, make_clock(context)).replay if on_gpu else work
    run()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    if context.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = layer_parser("python -m ep_a2a.commands.bench.overlap", __doc__.partition("\n")[0])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES, help="which")
    parser.add_argument(
        "--comm-sms", type=at_least(0), default=24, help="multiprocessors of ops beside computation; 0 = all"
    )
    parser.add_argument("--traces", type=Path, help="folder for Chrome traces")
    options = parse_options(parser, arguments)
    settings = OverlapSettings(
        tuple(options.schedules), options.comm_sms, options.intermediate, options.timing, options.traces
    )
    run_sweep(options, COLUMNS, run_overlap, settings)


if __name__ == "__main__":
    main()
