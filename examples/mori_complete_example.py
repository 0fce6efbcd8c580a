"""Runs a MORI program on this package: MORI's names, another import.

python examples/mori_complete_example.py --ranks 4 [--device cuda]

Each rank routes random tokens to random experts. The experts return their input, so combine must give every token times
the number of distinct ranks it went to. Sizes are small enough for a CPU; a large model has hidden size 7168, 4096
tokens, 32 experts per rank and top-8.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import ep_a2a as mori
from ep_a2a.routing import num_distinct_ranks


def run_rank(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    world_size, on_gpu = options.ranks, options.device == "cuda"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, rendezvous, rank=rank, world_size=world_size)

    # "default" is torch's default group. The device argument is this package's addition.
    mori.shmem.shmem_torch_process_group_init("default", device)

    config = mori.ops.EpDispatchCombineConfig(
        data_type=torch.bfloat16,
        rank=rank,
        world_size=world_size,
        hidden_dim=options.hidden,
        scale_dim=0,
        scale_type_size=1,
        max_token_type_size=4,
        max_num_inp_token_per_rank=options.max_tokens,
        num_experts_per_rank=options.experts_per_rank,
        num_experts_per_token=options.topk,
        warp_num_per_block=8,
        block_num=80,
        use_external_inp_buf=False,
        kernel_type=mori.ops.EpDispatchCombineKernelType.IntraNode,
    )
    op = mori.ops.EpDispatchCombineOp(config)

    num_experts = options.experts_per_rank * world_size
    torch.manual_seed(rank)
    tokens = torch.randn(options.tokens, config.hidden_dim).to(device, config.data_type)
    weights = torch.rand(options.tokens, config.num_experts_per_token).to(device)
    indices = torch.randint(num_experts, (options.tokens, config.num_experts_per_token), dtype=torch.int32).to(device)

    received, received_weights, _, _, num_received = op.dispatch(
        tokens, weights, None, indices, block_num=80, warp_per_block=8
    )

    # use_external_inp_buf=False promises that the experts write into the op's combine buffer.
    expert_rows = op.get_registered_combine_input_buffer(config.data_type, config.hidden_dim)
    count = int(num_received)
    expert_rows[:count] = received[:count]

    # The indices are this rank's own, as given to dispatch. The weights are those that dispatch returned, in the order
    # of the received tokens; this rank's own would be an error. Both may be None.
    combined, combined_weights = op.combine(
        expert_rows, received_weights, indices, block_num=80, warp_per_block=8, call_reset=False
    )

    num_ranks = num_distinct_ranks(indices, num_experts, world_size)[:, None]
    expected = (tokens.float() * num_ranks).to(config.data_type)
    error = (combined[: options.tokens].float() - expected.float()).abs().max().item()
    weight_error = (combined_weights[: options.tokens] - weights * num_ranks).abs().max().item()
    print(f"rank {rank}: received {count} tokens; error {error:g} of the tokens, {weight_error:.1e} of the weights")

    del op
    mori.shmem.shmem_finalize()
    dist.destroy_process_group()
    if error > 0 or weight_error > 1e-5:
        sys.exit("the combined tokens are not what they should be")


def main() -> None:
    parser = argparse.ArgumentParser(description="A MORI program on ep_a2a.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each rank")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens that a rank may have at most")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts-per-rank", type=int, default=4)
    parser.add_argument("--topk", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        torch.multiprocessing.spawn(run_rank, (options, rendezvous), nprocs=options.ranks)
    print("combine gave every token times the number of ranks it went to")


if __name__ == "__main__":
    main()
