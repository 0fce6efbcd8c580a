"""Makes the calls of an inference engine: an expert-parallel group, its all-to-all manager, one op per MoE layer.

python examples/ep_group_example.py --ranks 4 [--device cuda] [--backend allgather_reducescatter]

Tokens travel as fp8 with one scale per token. The experts return their input, so combine must give every token, as fp8
keeps it, times the number of distinct ranks it went to.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from ep_a2a import destroy_dist_env, get_ep_group, init_dist_env
from ep_a2a.config import num_owned_experts
from ep_a2a.quantization import dequantize, quantize_per_token
from ep_a2a.routing import num_distinct_ranks, softmax_topk

QUANT_TYPE = "fp8_per_token"


def run_rank(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    # Data parallel over all ranks, no tensor parallelism: a rank is the only one of its replica.
    init_dist_env(
        tensor_model_parallel_size=1,
        rankID=0,
        backend="nccl" if options.device == "cuda" else "gloo",
        distributed_init_method=rendezvous,
        local_rank=rank,
        data_parallel_size=options.ranks,
        data_parallel_rank=rank,
        all2all_backend=options.backend,
    )
    ep_group = get_ep_group()
    manager = ep_group.device_communicator.all2all_manager

    torch.manual_seed(rank)
    # Ranks bring different numbers of tokens; all agree on a maximum.
    num_tokens = max(0, options.max_tokens - 3 * rank)
    hidden_states = torch.randn(num_tokens, options.hidden).to(ep_group.device, torch.bfloat16)
    topk_weights, topk_ids = softmax_topk(torch.randn(num_tokens, options.experts).to(ep_group.device), options.topk)
    tokens, scales = quantize_per_token(hidden_states)

    # The layer keeps the op: the manager holds only a weak reference.
    op = manager.get_handle(
        {
            "rank": ep_group.rank_in_group,
            "num_ep_ranks": ep_group.world_size,
            "input_dtype": hidden_states.dtype,
            "quant_dtype": tokens.dtype,
            "token_hidden_size": options.hidden,
            "scale_dim": scales.shape[-1],
            "scale_type_size": scales.dtype.itemsize,
            "max_num_tokens_per_dp_rank": options.max_tokens,
            # Where the ranks do not divide the experts, the first ranks own one more.
            "num_local_experts": num_owned_experts(options.experts, ep_group.world_size, ep_group.rank_in_group),
            "num_experts": options.experts,
            "num_experts_per_token": options.topk,
            "gpu_per_node": ep_group.world_size,
        }
    )

    received, received_weights, received_scales, _, num_received = op.dispatch(tokens, topk_weights, scales, topk_ids)

    count = int(num_received)
    expert_rows = torch.empty(received.shape, dtype=hidden_states.dtype, device=ep_group.device)
    expert_rows[:count] = dequantize(received[:count], received_scales[:count], QUANT_TYPE, hidden_states.dtype)

    # Combine adds rows; the experts multiply by router weights. It adds the weights that dispatch returned likewise, in
    # the order of the received rows; None adds none. This rank's own weights [T, K] would be an error.
    combined, _ = op.combine(expert_rows, received_weights, topk_ids)
    result = combined[:num_tokens]

    num_ranks = num_distinct_ranks(topk_ids, options.experts, options.ranks)[:, None]
    kept = dequantize(tokens, scales, QUANT_TYPE, hidden_states.dtype)
    expected = (kept.float() * num_ranks).to(hidden_states.dtype)
    exact = torch.equal(result, expected)
    print(f"rank {rank}: {num_tokens} tokens sent, {count} received; combined {'as' if exact else 'NOT as'} expected")

    destroy_dist_env()
    if not exact:
        sys.exit("the combined tokens are not what they should be")


def main() -> None:
    parser = argparse.ArgumentParser(description="An expert-parallel group and its all-to-all manager.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", help="name of the all-to-all backend")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of the rank that has most")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16, help="experts over all ranks")
    parser.add_argument("--topk", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        torch.multiprocessing.spawn(run_rank, (options, rendezvous), nprocs=options.ranks)
    print("combine gave every token times the number of ranks it went to")


if __name__ == "__main__":
    main()
