"""`ep-a2a tune`: measures launch numbers on this machine's GPUs and writes the fastest to tuned tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a.commands import options as opt
from ep_a2a.commands.messages import EXIT_MISMATCH, EXIT_OK

if TYPE_CHECKING:
    from types import SimpleNamespace

LAYOUT = "To measure with: compact, rank_major. Entries serve, and replace those of, all layouts."
MICRO_BATCHES = (
    "Instead: find the multiprocessors of a combine beside another micro-batch's experts, out of these, such as "
    "8,12,16 (0: no bound). Sizes are of one micro-batch; default: 1024,4096. Writes no tables."
)
MAX_SMS = "Bounds on each rank's multiprocessors (CTAs) to tune for, such as 8,16,24; 0 = none."
A_FOLDER = {"file_okay": False}

OPTIONS = (
    opt.number("ranks", "Processes; more than GPUs share them. Default: one per GPU.", opt.MOST_PROCESSES),
    opt.numbers("max_tokens", "Sizes (max_num_tokens) to tune; default: 1,4,16,32,...,8192."),
    opt.number("hidden", "Hidden size.", opt.MOST_HIDDEN, 7168),
    opt.number("topk", "Experts per token.", opt.MOST_TOPK, 8),
    opt.number("experts", "Experts over all ranks.", opt.MOST_EXPERTS, 256),
    opt.Option("dtype", str, "bfloat16, float16, float32.", "bfloat16"),
    opt.Option("quant", str, "Cast of dispatch: none, fp8_per_token, fp8_per_1x128, mxfp8.", "fp8_per_1x128"),
    opt.names("combine_quant", "Casts of combine: none, fp8_blockwise, fp8_direct_cast.", "none"),
    opt.Option("max_sms", str, MAX_SMS, "0", read=opt.read_bounds),
    opt.Option("layout", str, LAYOUT, "rank_major"),
    opt.Option("budget_secs", float, "Seconds of search for each size.", 60.0, limits={"min": 1}),
    opt.number("iterations", "Timed runs of each trial.", opt.MOST_ITERATIONS, 20),
    opt.Option("output", Path, "Folder; default: EP_A2A_TUNING_DIR, the checkout's configs/.", limits=A_FOLDER),
    opt.Option("micro_batches", str, MICRO_BATCHES, read=opt.read_bounds),
    opt.number("intermediate", "Intermediate size of an expert, with --micro-batches.", opt.MOST_HIDDEN, 2048),
    opt.AS_JSON,
    opt.SEED,
)


def run(options: SimpleNamespace) -> int:
    """Search for the fastest launch numbers of dispatch and combine, and write tuned tables.

    Each trial is checked, then timed as a round trip in a CUDA graph. Entries of other shapes stay in the tables. The
    exit code is 1 where a size could not be measured. It needs GPUs: times on CPU say nothing about them. Where ranks
    share GPUs, it demands --output: such launches are not for ranks with a GPU each.
    """
    import torch

    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import make_workloads
    from ep_a2a.commands.tune import DEFAULT_SIZES, check_can_tune, default_output, execute
    from ep_a2a.topology.gpu_share import sharing_note

    world_size = options.ranks or torch.cuda.device_count()
    check_can_tune(world_size)
    note = sharing_note(world_size, torch.cuda.device_count())
    fields = ("hidden_dim", "topk", "num_experts", "dtype", "quant_type", "layout", "seed")
    fixed = {name: (value,) for name, value in opt.given(opt.values_of_fields(options, fields)).items()}
    fixed = {"world_size": (world_size,), "combine_quant": options.combine_quant} | fixed
    if options.micro_batches:
        return EXIT_OK if _tune_micro_batches(options, fixed) else EXIT_MISMATCH
    folder = options.output or default_output(note)
    sizes = options.max_tokens or DEFAULT_SIZES
    points = make_workloads(fixed | {"max_sms": options.max_sms, "num_tokens": sizes})
    settings = TimingSettings(num_warmups=5, num_runs=options.iterations)
    complete = execute(points, settings, options.budget_secs, folder, as_json=options.as_json, note=note)
    return EXIT_OK if complete else EXIT_MISMATCH


def _tune_micro_batches(options: SimpleNamespace, fixed: dict[str, tuple[Any, ...]]) -> bool:
    from ep_a2a.commands.bench.layer import LayerWorkload
    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import make_workloads
    from ep_a2a.commands.tune_overlap import execute

    opt.refuse({"output": options.output}, "with --micro-batches, which write no tables", "Leave it out.")
    sizes = {"num_tokens": options.max_tokens or (1024, 4096), "intermediate_dim": (options.intermediate,)}
    points = make_workloads(fixed | sizes, LayerWorkload)
    settings = TimingSettings(num_warmups=2, num_runs=options.iterations, num_round_trips=4, num_rounds=4)
    return execute(points, options.micro_batches, settings, as_json=options.as_json)
