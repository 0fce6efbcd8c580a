"""`ep-a2a plan`: computes an op's memory on each GPU, and predicts exchanges between nodes, without a GPU."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ep_a2a.commands.options import (
    MOST_EXPERTS,
    MOST_PLANNED,
    MOST_RANKS,
    MOST_SEED,
    MOST_TOKENS,
    MOST_TOPK,
    AsJson,
    OutputFile,
    Quant,
    Quiet,
    Verbose,
)


def _model(text: str, **limits: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Of a model in vLLM", **limits)


def _op(text: str, least: int | None = None, most: int | None = None) -> Any:
    return typer.Option(help=text, rich_help_panel="Of any op", min=least, max=most)


def _nodes(text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Between nodes (predicted by a simulator)", **limits)


def command(
    vllm: Annotated[Path | None, _model("A model's config.json, or its folder.", exists=True)] = None,
    data_parallel_size: Annotated[int | None, _model("As vLLM's; at least 2.", min=1, max=MOST_RANKS)] = None,
    tensor_parallel_size: Annotated[int | None, _model("As vLLM's; default: 1.", min=1, max=MOST_RANKS)] = None,
    max_num_batched_tokens: Annotated[int | None, _model("As vLLM's; default: 8192.", min=1, max=MOST_TOKENS)] = None,
    num_redundant_experts: Annotated[
        int | None, _model("Of vLLM's load balancer; default: 0.", min=0, max=MOST_EXPERTS)
    ] = None,
    sequence_parallel: Annotated[
        bool | None, _model("Tensor-parallel ranks share their replica's tokens; default: by model.")
    ] = None,
    ranks: Annotated[int | None, _op("GPUs; default: 8.", 1, MOST_RANKS)] = None,
    gpus_per_node: Annotated[
        int | None, _op("GPUs of a node; default: all, with --nodes or --vllm 8.", 1, MOST_RANKS)
    ] = None,
    max_tokens: Annotated[int | None, _op("Tokens per rank; default: 4096.", 1, MOST_TOKENS)] = None,
    topk: Annotated[int | None, _op("Experts per token; default: 8.", 1, MOST_TOPK)] = None,
    experts: Annotated[int | None, _op("Experts over all ranks; default: 256.", 1, MOST_EXPERTS)] = None,
    layout: Annotated[str | None, _op("compact (default), rank_major, expert_major.")] = None,
    combine_quant: Annotated[
        str | None, _op("Cast of combine: none (default), fp8_blockwise, fp8_direct_cast.")
    ] = None,
    scale_format: Annotated[str | None, _op("float32 (default), ue8m0, float32_power_of_two.")] = None,
    max_total_recv_tokens: Annotated[int | None, _op("Cap on received rows; default: none.", 0, MOST_TOKENS)] = None,
    flagged_max_tokens: Annotated[
        int | None, _op("Most tokens of a rank in the low-latency dispatch; default: 128.", 0, MOST_TOKENS)
    ] = None,
    nodes: Annotated[str | None, _nodes("Predict for numbers of nodes, separated by commas.")] = None,
    nic_gbps: Annotated[float | None, _nodes("Rate of each GPU's NIC, Gb/s; default: 400.")] = None,
    chunk_tokens: Annotated[int | None, _nodes("Tokens that cross in one message; default: 64.")] = None,
    num_credits: Annotated[int | None, _nodes("Chunks on the way to a node; default: 8.", "--credits")] = None,
    published: Annotated[bool, _nodes("Predict other libraries' published times.", "--published")] = False,
    markdown: Annotated[Path | None, _nodes("Write the predictions as markdown.", dir_okay=False)] = None,
    plot: Annotated[Path | None, _nodes("Draw the predictions (PNG, SVG).", dir_okay=False)] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, max=MOST_PLANNED, help="Hidden size; default: the model's, else 7168.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32; default: the model's, else bfloat16.")
    ] = None,
    quant: Annotated[Quant | None, typer.Option(help="Cast of dispatch; default: the model's, else none.")] = None,
    as_json: AsJson = False,
    output: OutputFile = None,
    seed: Annotated[int | None, _nodes("Seed of the routing; default: 0.", min=0, max=MOST_SEED)] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Print what an op's buffers take on each GPU: with --vllm for a model, else for the sizes that are named.

    It needs no GPU and starts nothing. The total is exactly what the op allocates when it is built.

    With --nodes it prints what dispatch and combine between nodes are predicted to take, and with --published how far
    such predictions are off, instead.
    """
    options = dict(locals())
    from ep_a2a.commands.plan.command import execute

    execute(options)
