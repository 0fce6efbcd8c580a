"""Goes on serving after ranks have been killed: the others make a group of their own and use the experts' copies.

python examples/go_on_example.py [--ranks 4] [--victim 1]
python examples/go_on_example.py --victim 1 2

Each of eight logical experts has a copy on a second rank, the one before its owner. Where both are killed, the expert
is lost, and the tokens' choices of it are left out. The experts return their input, so combine must give every
token times the number of distinct ranks that it went to, before the death and after it. Runs on CPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a import create_manager, survivors
from ep_a2a.errors import RankTimeoutError
from ep_a2a.routing import num_distinct_ranks

NUM_LOGICAL, TOPK, HIDDEN, NUM_TOKENS = 8, 2, 64, 6
STEPS_BEFORE, STEPS_AFTER = 2, 3
TIMEOUT_SECS = 15.0


def placement(num_ranks: int) -> list[list[int]]:
    """Every expert on two ranks that are neighbours: rank r has what it owns, and what rank r + 1 owns."""
    owned = [[expert for expert in range(NUM_LOGICAL) if expert % num_ranks == rank] for rank in range(num_ranks)]
    places = max(map(len, owned))
    padded = [experts + [-1] * (places - len(experts)) for experts in owned]
    return [padded[rank] + padded[(rank + 1) % num_ranks] for rank in range(num_ranks)]


def make_op(manager: Any, num_local_experts: int) -> Any:
    """An op for tokens of this example; the manager keeps it weakly."""
    return manager.get_handle(
        {
            "rank": manager.rank,
            "num_ep_ranks": manager.world_size,
            "input_dtype": torch.bfloat16,
            "quant_dtype": None,
            "token_hidden_size": HIDDEN,
            "max_num_tokens_per_dp_rank": NUM_TOKENS,
            "num_local_experts": num_local_experts,
            "num_experts_per_token": TOPK,
            "timeout_secs": TIMEOUT_SECS,
        }
    )


def step(op: Any, world_size: int, physical: torch.Tensor, num_physical: int) -> None:
    """One dispatch and combine of random tokens, checked."""
    tokens = torch.randn(NUM_TOKENS, HIDDEN).to(torch.bfloat16)
    received = op.dispatch(tokens, None, None, physical.int())[0]
    combined, _ = op.combine(received, None, None)
    op.check()
    copies = num_distinct_ranks(physical, num_physical, world_size)[:, None]
    expected = (tokens.float() * copies).to(torch.bfloat16)
    if not torch.equal(combined[:NUM_TOKENS], expected):
        sys.exit("the combined tokens are not what they should be")


def run_rank(rank: int, options: argparse.Namespace, rendezvous: str) -> None:
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=options.ranks)
    experts_of_ranks = placement(options.ranks)
    num_local = len(experts_of_ranks[0])
    manager = create_manager("ep_a2a", dist.group.WORLD)
    manager.device = "cpu"
    op = make_op(manager, num_local)
    torch.manual_seed(rank)
    for number in range(STEPS_BEFORE + 1):
        if number == STEPS_BEFORE and rank in options.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        # the first copy of each expert is in the first half of its owner's places
        logical = torch.rand(NUM_TOKENS, NUM_LOGICAL).argsort(1)[:, :TOPK]
        physical = logical % options.ranks * num_local + logical // options.ranks
        try:
            step(op, options.ranks, physical, options.ranks * num_local)
        except RankTimeoutError as error:
            print(f"rank {rank}: ranks {list(error.missing_ranks)} are gone", flush=True)
            left = survivors(error, manager, experts_of_ranks)
            break
    else:
        sys.exit(f"rank {rank}: nobody was missed")
    op = make_op(left.manager, num_local)
    for _ in range(STEPS_AFTER):
        logical = torch.rand(NUM_TOKENS, NUM_LOGICAL).argsort(1)[:, :TOPK]
        step(op, len(left.ranks), left.physical_ids(logical), len(left.experts))
    print(f"rank {rank}: went on as rank {left.manager.rank} of {len(left.ranks)}, lost experts {left.lost_experts}")
    left.manager.destroy()
    # the process of the group's store must be the last to go
    dist.barrier(left.group)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ranks are killed, the others go on.")
    parser.add_argument("--ranks", type=int, choices=range(3, NUM_LOGICAL + 1), default=4)
    parser.add_argument(
        "--victim", type=int, nargs="+", default=[1], help="the ranks that are killed; two must be left"
    )
    parser.add_argument("--secs", type=int, default=120, help="bound of the whole program")
    options = parser.parse_args()
    ranks, victims = set(range(options.ranks)), set(options.victim)
    if not victims <= ranks or len(ranks - victims) < 2:
        parser.error(f"argument --victim: expected ranks below {options.ranks}, two others left, got {options.victim}")
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        context = torch.multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=run_rank, args=(rank, options, rendezvous)) for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + options.secs
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode is None for process in processes):
            for process in processes:
                process.kill()
                process.join()
            sys.exit(f"not done within {options.secs:g} s")
    codes = [process.exitcode for process in processes]
    if codes != [-signal.SIGKILL if rank in options.victim else 0 for rank in range(options.ranks)]:
        sys.exit(f"exit codes {codes}")
    print("combine gave every token times the number of ranks it went to, before and after")


if __name__ == "__main__":
    main()
