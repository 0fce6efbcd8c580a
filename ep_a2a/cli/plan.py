"""`ep-a2a plan`: computes an op's memory on each GPU, without a GPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from ep_a2a.cli import options as opt
from ep_a2a.commands.options import Quant

VLLM = "A model's config.json, or its folder."
REDUNDANT = "With --vllm: of vLLM's load balancer; default: 0."
SHARED = "With --vllm: tensor-parallel ranks share their replica's tokens; default: by model."
COMBINE_QUANT = "Cast of combine: none (default), fp8_blockwise, fp8_direct_cast."
RECV = "Cap on received rows; default: none."
FLAGGED = "Most tokens of a rank in the low-latency dispatch; default: 128."
TRAINING = "Also what a layer of ep_a2a.autograd keeps."
DTYPE = "bfloat16, float16, float32; default: the model's, else bfloat16."


def plan(
    vllm: Annotated[Path | None, typer.Option(exists=True, help=VLLM)] = None,
    data_parallel_size: Annotated[int | None, opt.number("As vLLM's; at least 2.", opt.MOST_RANKS)] = None,
    tensor_parallel_size: Annotated[int | None, opt.number("As vLLM's; default: 1.", opt.MOST_RANKS)] = None,
    max_num_batched_tokens: Annotated[int | None, opt.number("As vLLM's; default: 8192.", opt.MOST_TOKENS)] = None,
    num_redundant_experts: Annotated[int | None, opt.number(REDUNDANT, opt.MOST_EXPERTS, least=0)] = None,
    sequence_parallel: Annotated[bool | None, typer.Option(help=SHARED)] = None,
    ranks: Annotated[int | None, opt.number("GPUs; default: 8.", opt.MOST_RANKS)] = None,
    gpus_per_node: Annotated[
        int | None, opt.number("GPUs of a node; default: all, with --vllm 8.", opt.MOST_RANKS)
    ] = None,
    max_tokens: Annotated[int | None, opt.number("Tokens per rank; default: 4096.", opt.MOST_TOKENS)] = None,
    topk: Annotated[int | None, opt.number("Experts per token; default: 8.", opt.MOST_TOPK)] = None,
    experts: Annotated[int | None, opt.number("Experts over all ranks; default: 256.", opt.MOST_EXPERTS)] = None,
    layout: Annotated[str | None, typer.Option(help="compact (default), rank_major, expert_major.")] = None,
    combine_quant: Annotated[str | None, typer.Option(help=COMBINE_QUANT)] = None,
    scale_format: Annotated[str | None, typer.Option(help="float32 (default), ue8m0, float32_power_of_two.")] = None,
    max_total_recv_tokens: Annotated[int | None, opt.number(RECV, opt.MOST_TOKENS, least=0)] = None,
    flagged_max_tokens: Annotated[int | None, opt.number(FLAGGED, opt.MOST_TOKENS, least=0)] = None,
    training: Annotated[bool, typer.Option("--training", help=TRAINING)] = False,
    hidden: Annotated[int | None, opt.number("Hidden size; default: the model's, else 7168.", opt.MOST_PLANNED)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE)] = None,
    quant: Annotated[Quant | None, typer.Option(help="Cast of dispatch; default: the model's, else none.")] = None,
    as_json: opt.AsJson = False,
    output: opt.Output = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Print what an op's buffers take on each GPU.

    With --vllm it plans for a model, else for the sizes that are named. It needs no GPU and starts nothing. The total
    is exactly what the op allocates when it is built.
    """
    options = SimpleNamespace(**locals())
    from ep_a2a.commands.plan.command import execute

    execute(options)
