"""`ep-a2a bench`: checks dispatch and combine, then times them, or whole layers, beside baselines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ep_a2a.commands import options as opt
from ep_a2a.commands.messages import EXIT_MISMATCH, EXIT_OK

if TYPE_CHECKING:
    from types import SimpleNamespace

CONTENDER_NAMES = (
    "reference_push, ep_a2a, ep_a2a_bounded (max_num_tokens given), ep_a2a_precast (tokens cast before), ep_a2a_v1, "
    "ep_a2a_v1_ll, ep_a2a_flat, ep_a2a_staged, ep_a2a_nvshmem (only when named), nccl_agrs, nccl_all_to_all, "
    "flashinfer, deepep"
)
LAYERS = "Layers"
MICRO_BATCHES = (
    "Run two micro-batches beside each other; combine gets so many multiprocessors, such as 8,16, dispatch three "
    "quarters; 0 = all. One more run shares those of the products."
)
MAX_SMS = "Bounds on each rank's multiprocessors (CTAs), such as 8,16; 0 = none, or its share."


OPTIONS = (
    opt.numbers("ranks", "Processes; more than GPUs share them. Default: one per GPU, 2 on CPU, torchrun's."),
    opt.DEVICE,
    opt.numbers("tokens", "Tokens per rank; default: 1,16,32,128,512,4096 on GPUs."),
    opt.names("max_tokens", "What buffers are made for: numbers, or same (as tokens).", "same"),
    opt.numbers("hidden", "Hidden sizes; default: 7168 on GPUs.", opt.MOST_HIDDEN),
    opt.numbers("topk", "Experts per token; default: 8 on GPUs.", opt.MOST_TOPK),
    opt.numbers("experts", "Experts over all ranks; default: 256 on GPUs.", opt.MOST_EXPERTS),
    opt.names("dtype", "bfloat16, float16, float32.", "bfloat16"),
    opt.names("quant", "Cast of dispatch: none, fp8_per_token, fp8_per_1x128 (default), mxfp8."),
    opt.names("combine_quant", "Cast of combine: none, fp8_blockwise, fp8_direct_cast.", "none"),
    opt.names("layout", "compact (default), rank_major (of layers), expert_major."),
    opt.names("routing", "uniform, zipf, all_to_one, ...: names in ep_a2a.routing.", "uniform"),
    opt.Option("max_sms", str, MAX_SMS, "0", read=opt.read_bounds),
    opt.flag("shared_gpu", "Put all ranks on the first GPU; 2 ranks unless --ranks says more."),
    opt.flag("cold_cache", "Time round trips behind a flushed L2, too; always where ranks share."),
    opt.numbers("gpus_per_node", "Cut virtual nodes of so many ranks; 0 = one node.", default="0"),
    opt.names("contenders", f"Default: all that make sense. Names: {CONTENDER_NAMES}."),
    opt.number(
        "iterations", "Timed runs; default: 50, of layers 10 in each round, on CPU 2 and 1.", opt.MOST_ITERATIONS
    ),
    opt.number("warmups", "Untimed runs; default: 20, of layers 2, on CPU 0.", opt.MOST_ITERATIONS, least=0),
    opt.AS_JSON,
    opt.Option("output", Path, "Write JSON lines, a header and a line per row."),
    opt.SEED,
    opt.file("plot", "Draw round trip over tokens, or bounds (PNG, SVG)."),
    opt.flag("layer", "Time whole MoE layers with fp8 experts over ep_a2a, flashinfer, nccl_agrs.", panel=LAYERS),
    opt.number("layers", "Layers in one CUDA graph; default: 4, on CPU 1.", opt.MOST_ITERATIONS, panel=LAYERS),
    opt.numbers("intermediate", "Intermediate sizes of an expert; default: 2048 on GPUs.", panel=LAYERS),
    opt.Option("micro_batches", str, MICRO_BATCHES, read=opt.read_bounds, panel=LAYERS),
    opt.number("rounds", "Times that contenders take turns; default: 4, on CPU 1.", opt.MOST_ITERATIONS, panel=LAYERS),
)


def run(options: SimpleNamespace) -> int:
    """Check, then time dispatch, combine and their round trip beside baselines and a push of the same bytes.

    Options that take several values separate them by commas; every combination is measured. Runs under torchrun too.
    The exit code is 1 where a contender returned a wrong result or raised. Times on CPU say nothing about GPUs.
    """
    from ep_a2a.commands.bench.command import run as measure

    return EXIT_OK if measure(options) else EXIT_MISMATCH
