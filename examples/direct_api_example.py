"""Uses an op without groups and managers, as benchmarks and tests do: a process group, a config, an op.

python examples/direct_api_example.py --ranks 4 [--device cuda]

Tokens travel as fp8 with one scale per 128 elements. The experts return their input, so combine must give every token,
as fp8 keeps it, times the number of distinct ranks it went to. ep_a2a.testing starts the processes, with a process
group.
"""

from __future__ import annotations

import argparse
import sys

import torch

from ep_a2a import ops
from ep_a2a.quantization import dequantize, quantize_per_1x128
from ep_a2a.routing import num_distinct_ranks
from ep_a2a.testing import RankContext, run_ranks

QUANT_TYPE = "fp8_per_1x128"


def run_rank(context: RankContext, options: argparse.Namespace) -> float:
    """Returns the largest error on this rank."""
    torch.manual_seed(context.rank)
    num_experts = options.experts_per_rank * context.world_size
    hidden_states = torch.randn(options.tokens, options.hidden).to(context.device, torch.bfloat16)
    topk_weights = torch.rand(options.tokens, options.topk).to(context.device)
    topk_ids = torch.randint(num_experts, (options.tokens, options.topk), dtype=torch.int32).to(context.device)
    tokens, scales = quantize_per_1x128(hidden_states)

    config = ops.EpDispatchCombineConfig(
        data_type=tokens.dtype,
        rank=context.rank,
        world_size=context.world_size,
        hidden_dim=options.hidden,
        scale_dim=scales.shape[-1],
        scale_type_size=scales.dtype.itemsize,
        max_token_type_size=torch.bfloat16.itemsize,
        max_num_inp_token_per_rank=options.tokens,
        num_experts_per_rank=options.experts_per_rank,
        num_experts_per_token=options.topk,
    )
    with ops.EpDispatchCombineOp(config, group=context.group) as op:
        received, _, received_scales, _, num_received = op.dispatch(tokens, topk_weights, scales, topk_ids)
        count = int(num_received)
        expert_rows = torch.empty(received.shape, dtype=torch.bfloat16, device=context.device)
        expert_rows[:count] = dequantize(received[:count], received_scales[:count], QUANT_TYPE, torch.bfloat16)
        # No weights: combine adds them row by row, in the order of the received rows. This rank's own topk_weights have
        # another order and would be an error.
        combined, _ = op.combine(expert_rows, None, topk_ids)

        num_ranks = num_distinct_ranks(topk_ids, num_experts, context.world_size)[:, None]
        kept = dequantize(tokens, scales, QUANT_TYPE, torch.bfloat16)
        expected = (kept.float() * num_ranks).to(torch.bfloat16)
        return (combined[: options.tokens].float() - expected.float()).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="An op without groups and managers.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--experts-per-rank", type=int, default=4)
    parser.add_argument("--topk", type=int, default=4)
    options = parser.parse_args()
    errors = run_ranks(run_rank, options.ranks, options, device=options.device)
    for rank, error in enumerate(errors):
        print(f"rank {rank}: error {error:g}")
    if any(errors):
        sys.exit("the combined tokens are not what they should be")
    print("combine gave every token times the number of ranks it went to")


if __name__ == "__main__":
    main()
