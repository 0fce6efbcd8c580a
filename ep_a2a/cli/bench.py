"""`ep-a2a bench`: checks dispatch and combine, then times them, or whole layers, beside baselines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from ep_a2a.cli import options as opt
from ep_a2a.commands.options import Device

CONTENDER_NAMES = (
    "reference_push, ep_a2a, ep_a2a_v1, ep_a2a_v1_ll, ep_a2a_flat, ep_a2a_staged, ep_a2a_nvshmem (only when named), "
    "nccl_agrs, flashinfer, deepep"
)
RANKS = "Processes; more than GPUs share them. Default: one per GPU, 2 on CPU, torchrun's."
MAX_SMS = "Bounds on each rank's multiprocessors (CTAs), such as 8,16, within its share; 0 = none."
ITERATIONS = "Timed runs; default: 50, of layers 10 in each round, on CPU 2 and 1."
LAYER = "Time whole MoE layers with fp8 experts over ep_a2a, flashinfer, nccl_agrs."
MICRO_BATCHES = (
    "With --layer: run two micro-batches beside each other; combine gets so many multiprocessors, such as 8,16, "
    "dispatch three quarters; 0 = all. One more run shares those of the products."
)
UNEVEN = "With --layer: rank 0 alone has --tokens (default: 8192), each other rank a 128th; adds ep_a2a_packed."
ROUNDS = "With --layer: times that contenders take turns; default: 4, on CPU 1."


def bench(
    ranks: Annotated[Any, opt.numbers(RANKS)] = None,
    device: opt.OnDevice = Device.AUTO,
    tokens: Annotated[Any, opt.numbers("Tokens per rank; default: 1,16,32,128,512,4096 on GPUs.")] = None,
    hidden: Annotated[Any, opt.numbers("Hidden sizes; default: 7168 on GPUs.", opt.MOST_HIDDEN)] = None,
    topk: Annotated[Any, opt.numbers("Experts per token; default: 8 on GPUs.", opt.MOST_TOPK)] = None,
    experts: Annotated[Any, opt.numbers("Experts over all ranks; default: 256 on GPUs.", opt.MOST_EXPERTS)] = None,
    quant: Annotated[Any, opt.names("Cast of dispatch: none, fp8_per_token, fp8_per_1x128 (default), mxfp8.")] = None,
    combine_quant: Annotated[Any, opt.names("Cast of combine: none, fp8_blockwise, fp8_direct_cast.")] = "none",
    layout: Annotated[Any, opt.names("compact (default), rank_major (of layers), expert_major.")] = None,
    routing: Annotated[Any, opt.names("uniform, zipf, all_to_one, ...: names in ep_a2a.routing.")] = "uniform",
    max_sms: Annotated[Any, opt.numbers(MAX_SMS)] = "0",
    gpus_per_node: Annotated[Any, opt.numbers("Cut virtual nodes of so many ranks; 0 = one node.")] = "0",
    contenders: Annotated[Any, opt.names(f"Default: all that make sense. Names: {CONTENDER_NAMES}.")] = None,
    iterations: Annotated[int | None, opt.number(ITERATIONS, opt.MOST_ITERATIONS)] = None,
    as_json: opt.AsJson = False,
    output: Annotated[Path | None, typer.Option(help="Write JSON lines, a header and a line per row.")] = None,
    seed: opt.Seed = None,
    layer: Annotated[bool, typer.Option("--layer", help=LAYER)] = False,
    intermediate: Annotated[
        Any, opt.numbers("With --layer: intermediate sizes of an expert; default: 2048 on GPUs.", least=1)
    ] = None,
    micro_batches: Annotated[Any, opt.numbers(MICRO_BATCHES)] = None,
    uneven: Annotated[bool, typer.Option("--uneven", help=UNEVEN)] = False,
    rounds: Annotated[int | None, opt.number(ROUNDS, opt.MOST_ITERATIONS)] = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Check dispatch and combine, then time them beside baselines.

    A push of the same bytes is timed too. Options that take several values separate them by commas; every combination
    is measured. Runs under torchrun, too. The exit code is 1 where a contender returned a wrong result or raised. Times
    on CPU say nothing about GPUs.
    """
    options = SimpleNamespace(**locals())
    from ep_a2a.commands.bench.command import run

    raise typer.Exit(0 if run(options) else 1)
