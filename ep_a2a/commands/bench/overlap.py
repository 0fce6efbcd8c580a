"""Times how much of a MoE layer's communication is exposed, one after another and beside computation.

python -m ep_a2a.commands.bench.overlap --ranks 4 --tokens 4096 --quant fp8_per_1x128 --comm-sms 24 --traces out/

Two schedules: "micro_batches" splits the tokens over two ops, "shared_expert" has a dense expert to run beside combine.
Each is timed as CUDA graph replays in turn and overlapped; exposed = layer - the same computation alone.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.bench.layer import WorkSession, computation_of, time_session
from ep_a2a.commands.bench.layer_model import check_layer, make_weights
from ep_a2a.commands.bench.layer_report import (
    at_least,
    layer_parser,
    layer_workload,
    parse_options,
    run_sweep,
    timing_settings,
)
from ep_a2a.commands.bench.layer_transports import check_transports
from ep_a2a.commands.bench.overlap_schedules import (
    Batch,
    Lanes,
    SharedExpert,
    batches_in_turn,
    batches_overlapped,
    shared_beside,
    shared_between,
    shared_in_turn,
)
from ep_a2a.commands.bench.timing import capture, make_clock
from ep_a2a.errors import ConfigError, UnsupportedError
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ep_a2a.commands.bench.contender import BenchContext
    from ep_a2a.commands.bench.layer_model import MoEWeights
    from ep_a2a.commands.bench.timing import TimingSettings
    from ep_a2a.commands.bench.workload import Workload

SCHEDULES = ("micro_batches", "shared_expert")
COLUMNS = ("tokens", "quant", "schedule", "variant", "comm_sms", "layer_us", "compute_us", "exposed_us")
SHARED_SEED = 78
NUM_TRACED = 3
"""Layers in a trace."""


@dataclasses.dataclass(frozen=True)
class OverlapSettings:
    """The schedules to run, and how.

    Attributes:
        schedules: out of SCHEDULES.
        comm_sms: multiprocessors of the ops where computation runs beside them; 0 = no bound.
        intermediate_dim: F, of routed and shared experts.
        timing: how often.
        traces: folder for Chrome traces of rank 0, `SCHEDULE_VARIANT_TOKENS.json.gz`; None for none.
    """

    schedules: tuple[str, ...]
    comm_sms: int
    intermediate_dim: int
    timing: TimingSettings
    traces: Path | None


def run_overlap(context: BenchContext, workload: Workload, settings: OverlapSettings) -> list[dict[str, Any]]:
    """Returns one row per schedule and variant, the same on all ranks. Collective.

    Raises:
        UnsupportedError: the op has no split calls.
        CheckFailedError: a variant's result is not the dense layer's.
    """
    from ep_a2a.ops.op import EpDispatchCombineOp

    check_transports((), workload)
    if not hasattr(EpDispatchCombineOp, "dispatch_send"):
        raise UnsupportedError("an op with split calls (dispatch_send, dispatch_recv, ...)", "one without")
    weights = make_weights(workload, settings.intermediate_dim, context)
    rendezvous = Rendezvous(context.group)
    rows = []
    for schedule in settings.schedules:
        run = _run_micro_batches if schedule == "micro_batches" else _run_shared_expert
        with Arena(context.group, context.device) as arena:
            rows += run(context, workload, settings, weights, rendezvous, arena)
    return rows


def _run_micro_batches(
    context: BenchContext, workload: Workload, settings: OverlapSettings, weights: MoEWeights, rendezvous: Rendezvous,
    arena: Arena,
) -> list[dict[str, Any]]:  # fmt: skip
    if workload.num_tokens % 2:
        raise ConfigError("an even number of tokens for two micro-batches", str(workload.num_tokens))
    half = dataclasses.replace(workload, num_tokens=workload.num_tokens // 2, max_num_tokens=workload.num_tokens // 2)
    parts = workload.inputs(context.rank, context.device).x.chunk(2)
    batches = [Batch(half, x.contiguous(), weights, context, arena, index) for index, x in enumerate(parts)]
    lanes = Lanes(context.device, settings.comm_sms)

    def check(results: list[torch.Tensor]) -> None:
        for batch, result in zip(batches, results, strict=True):
            check_layer("micro_batches", half, batch.gate, weights, context, result)

    variants = {
        "in_turn": functools.partial(batches_in_turn, batches, lanes),
        "overlapped": functools.partial(batches_overlapped, batches, lanes),
    }
    sessions = {name: WorkSession(work, check) for name, work in variants.items()}
    computes = [_computation(batch) for batch in batches]

    def compute() -> None:
        for each in computes:
            each()

    rows = _measure(context, workload, settings, rendezvous, "micro_batches", sessions, compute)
    for batch in batches:
        batch.transport.close()
    return rows


def _run_shared_expert(
    context: BenchContext, workload: Workload, settings: OverlapSettings, weights: MoEWeights, rendezvous: Rendezvous,
    arena: Arena,
) -> list[dict[str, Any]]:  # fmt: skip
    x = workload.inputs(context.rank, context.device).x
    batch, lanes = Batch(workload, x, weights, context, arena, 0), Lanes(context.device, settings.comm_sms)
    hidden, width = workload.hidden_dim, settings.intermediate_dim
    generator = torch.Generator(context.device).manual_seed(SHARED_SEED)
    drawn = [
        torch.randn(*shape, generator=generator, device=context.device, dtype=torch.bfloat16) / shape[1] ** 0.5
        for shape in ((2 * width, hidden), (hidden, width))
    ]
    shared = SharedExpert(x, *drawn)

    def check(result: torch.Tensor) -> None:
        check_layer("shared_expert", workload, batch.gate, weights, context, result.float() - shared().float())

    works = {"in_turn": shared_in_turn, "between": shared_between, "beside": shared_beside}
    sessions = {name: WorkSession(functools.partial(work, batch, shared, lanes), check) for name, work in works.items()}
    routed = _computation(batch)

    def compute() -> torch.Tensor:
        return routed()[: workload.num_tokens] + shared()

    rows = _measure(context, workload, settings, rendezvous, "shared_expert", sessions, compute)
    batch.transport.close()
    return rows


def _computation(batch: Batch) -> Callable[[], torch.Tensor]:
    """Gate and experts of a batch on a copy of its received rows."""
    batch.gate()
    compute = computation_of(batch.transport.dispatch(), batch.gate, batch.weights)
    batch.transport.combine()
    return compute


def _measure(
    context: BenchContext, workload: Workload, settings: OverlapSettings, rendezvous: Rendezvous, schedule: str,
    sessions: dict[str, WorkSession], compute: Callable[[], Any],
) -> list[dict[str, Any]]:  # fmt: skip
    compute_us = time_session(WorkSession(compute), context, rendezvous, settings.timing)
    rows = []
    for variant, session in sessions.items():
        session.check()
        layer_us = time_session(session, context, rendezvous, settings.timing)
        session.check()
        if settings.traces is not None:
            write_trace(session, context, settings.traces / f"{schedule}_{variant}_{workload.num_tokens}.json.gz")
        rows.append({
            "tokens": workload.num_tokens, "quant": workload.quant_type, "schedule": schedule, "variant": variant,
            "comm_sms": settings.comm_sms, "layer_us": layer_us, "compute_us": compute_us,
            "exposed_us": layer_us - compute_us,
        })  # fmt: skip
    return rows


def write_trace(session: WorkSession, context: BenchContext, path: Path) -> None:
    """Writes a Chrome trace of a few layers, replayed from a CUDA graph on a GPU, by rank 0. Collective."""
    from torch.profiler import ProfilerActivity, profile

    def work() -> None:
        for _ in range(NUM_TRACED):
            session.combine(None)

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
        tuple(options.schedules), options.comm_sms, options.intermediate, timing_settings(options), options.traces
    )
    run_sweep(options, run_overlap, [(layer_workload(options, tokens), settings) for tokens in options.tokens], COLUMNS)


if __name__ == "__main__":
    main()
