"""Runs code written for DeepEP on this package's kernels: only the import differs.

python examples/deep_ep_example.py --ranks 4 [--device cuda]

The experts return their input. Prefill: after dispatch and combine every token is itself times the number of ranks it
went to. Decode: after low_latency_dispatch and low_latency_combine, with two weights of one half, it is itself.
ep_a2a.testing starts the processes, with a process group.
"""

from __future__ import annotations

import argparse
import sys

import torch

from ep_a2a.compat.deep_ep import Buffer  # from deep_ep import Buffer
from ep_a2a.testing import RankContext, run_ranks

TOPK = 2


def prefill(buffer: Buffer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> float:
    per_rank, per_rdma_rank, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
    rows, _, _, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
    )
    combined, _, _ = buffer.combine(rows, handle)
    expected = (x.float() * is_token_in_rank.sum(1, keepdim=True)).to(x.dtype)
    return (combined.float() - expected.float()).abs().max().item()


def decode(buffer: Buffer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> float:
    rows, _, handle, _, hook = buffer.low_latency_dispatch(
        x, ids, x.shape[0], num_experts, use_fp8=False, return_recv_hook=True
    )
    hook()
    combined, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)
    hook()
    return (combined.float() - x.float()).abs().max().item()


def run_rank(context: RankContext, options: argparse.Namespace) -> float:
    """Returns the largest error on this rank."""
    torch.manual_seed(context.rank)
    num_experts = options.experts_per_rank * context.world_size
    x = torch.randn(options.tokens, options.hidden).to(context.device, torch.bfloat16)
    ids = torch.rand(options.tokens, num_experts).topk(TOPK).indices.to(context.device)
    weights = torch.full((options.tokens, TOPK), 1 / TOPK, device=context.device)
    buffer = Buffer(context.group, low_latency_mode=True, explicitly_destroy=True, device=context.device)
    errors = [mode(buffer, x, ids, weights, num_experts) for mode in (prefill, decode)]
    buffer.destroy()
    return max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepEP's interface on our kernels.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--experts-per-rank", type=int, default=2)
    options = parser.parse_args()
    errors = run_ranks(run_rank, options.ranks, options, device=options.device)
    for rank, error in enumerate(errors):
        print(f"rank {rank}: error {error:g}")
    if any(errors):
        sys.exit("the combined tokens are not what they should be")
    print("combine gave every token times the number of ranks it went to; low_latency_combine gave every token itself")


if __name__ == "__main__":
    main()
