"""`ep-a2a plan`: computes an op's memory on each GPU, and predicts exchanges between nodes, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ep_a2a.commands import options as opt

if TYPE_CHECKING:
    from types import SimpleNamespace

MODEL = "Of a model in vLLM"
OP = "Of any op"
NODES = "Between nodes (predicted by a simulator)"
EVERYWHERE = ("vllm", "nodes", "published", "gpus_per_node")
"""Options that choose the kind of plan, or act in several; the others act in the kind that their panel names."""
IS_THERE = {"exists": True}
SHARED = "Tensor-parallel ranks share their replica's tokens; default: by model."
FLAGGED = "Most tokens of a rank in the low-latency dispatch; default: 128."

OPTIONS = (
    opt.Option("vllm", Path, "A model's config.json, or its folder.", panel=MODEL, limits=IS_THERE),
    opt.number("data_parallel_size", "As vLLM's; at least 2.", opt.MOST_RANKS, panel=MODEL),
    opt.number("tensor_parallel_size", "As vLLM's; default: 1.", opt.MOST_RANKS, panel=MODEL),
    opt.number("max_num_batched_tokens", "As vLLM's; default: 8192.", opt.MOST_TOKENS, panel=MODEL),
    opt.number("num_redundant_experts", "Of vLLM's load balancer; default: 0.", opt.MOST_EXPERTS, least=0, panel=MODEL),
    opt.Option("sequence_parallel", bool, SHARED, panel=MODEL),
    opt.number("ranks", "GPUs; default: 8.", opt.MOST_RANKS, panel=OP),
    opt.number("gpus_per_node", "GPUs of a node; default: all, with --nodes or --vllm 8.", opt.MOST_RANKS, panel=OP),
    opt.number("max_tokens", "Tokens per rank; default: 4096.", opt.MOST_TOKENS, panel=OP),
    opt.number("topk", "Experts per token; default: 8.", opt.MOST_TOPK, panel=OP),
    opt.number("experts", "Experts over all ranks; default: 256.", opt.MOST_EXPERTS, panel=OP),
    opt.Option("layout", str, "compact (default), rank_major, expert_major.", panel=OP),
    opt.Option("combine_quant", str, "Cast of combine: none (default), fp8_blockwise, fp8_direct_cast.", panel=OP),
    opt.Option("scale_format", str, "float32 (default), ue8m0, float32_power_of_two.", panel=OP),
    opt.number("max_total_recv_tokens", "Cap on received rows; default: none.", opt.MOST_TOKENS, least=0, panel=OP),
    opt.number("flagged_max_tokens", FLAGGED, opt.MOST_TOKENS, least=0, panel=OP),
    opt.numbers("nodes", "Predict for numbers of nodes, separated by commas.", panel=NODES),
    opt.Option("nic_gbps", float, "Rate of each GPU's NIC, Gb/s; default: 400.", panel=NODES),
    opt.Option("chunk_tokens", int, "Tokens that cross in one message; default: 64.", panel=NODES),
    opt.Option("credits", int, "Chunks on the way to a node; default: 8.", panel=NODES),
    opt.flag("published", "Predict other libraries' published times.", panel=NODES),
    opt.number("hidden", "Hidden size; default: the model's, else 7168.", opt.MOST_PLANNED),
    opt.Option("dtype", str, "bfloat16, float16, float32; default: the model's, else bfloat16."),
    opt.Option("quant", opt.Quant, "Cast of dispatch; default: the model's, else none."),
    opt.AS_JSON,
    opt.OUTPUT,
    opt.number("seed", "Seed of the routing; default: 0.", opt.MOST_SEED, least=0, panel=NODES),
)


def run(options: SimpleNamespace) -> None:
    """Print what an op's buffers take on each GPU: with --vllm for a model, else for the sizes that are named.

    It needs no GPU and starts nothing. The total is exactly what the op allocates when it is built.

    With --nodes it prints what dispatch and combine between nodes are predicted to take, and with --published how far
    such predictions are off, instead.
    """
    from ep_a2a.commands.plan.command import execute

    values = vars(options)
    groups = [
        {each.name: values[each.name] for each in OPTIONS if each.panel == panel and each.name not in EVERYWHERE}
        for panel in (MODEL, OP, NODES)
    ]
    execute(options, *groups)
