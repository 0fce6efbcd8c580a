"""Runs the self-test on one rank: pushes with flags between two ranks, and steps of the op; compares every result."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ep_a2a import env
from ep_a2a.commands.measure.push import GAVE_UP, VECTOR_BYTES, Push, PushLaunch, pattern
from ep_a2a.commands.measure.session import make_config
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.errors import CheckFailedError, RankTimeoutError
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.reference import combine_reference, dispatch_reference
from ep_a2a.testing.worker import RankContext

if TYPE_CHECKING:
    from collections.abc import Callable


PUSH_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}
PUSH_LAUNCH = {"cpu": PushLaunch(1, 4096), "cuda": PushLaunch(132, 1024)}
MAX_ROUNDS = 10_000
NUM_TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 4, 64, 2, 2
REMEDY = "Look at the links and at the GPUs' errors: nvidia-smi -q -d ECC; dmesg | grep -i xid"
VALUES = 251
"""Tokens hold integers below this, which bf16 and sums of two of them hold exactly."""


@dataclass(frozen=True)
class PairResult:
    """What two ranks measured, or all ranks together.

    Attributes:
        gb_per_s: of pushes, 1e9 bytes per second: from the first to the second, and back; 0 where that is not known.
        num_pushes, num_steps: how many were made; each push ends with a flag, and all results were right.
        error, remedy: why they failed, and what to do; "" where they did not.
    """

    gb_per_s: tuple[float, float] = (0.0, 0.0)
    num_pushes: int = 0
    num_steps: int = 0
    error: str = ""
    remedy: str = ""


def check_pair(context: RankContext, pair: tuple[int, int], secs: float) -> PairResult | None:
    """Tests two ranks of the pool, for about `secs` seconds; to be called on all. None on the others.

    Raises:
        CheckFailedError: something arrived that had not been sent.
        RankTimeoutError: a flag did not come.
    """
    if context.rank not in pair:
        return None
    group = make_subgroup(context.group, pair)
    try:
        inside = RankContext(pair.index(context.rank), len(pair), context.device, group)
        rates, num_pushes = _push(inside, secs / 2)
        num_steps = check_op(inside, secs / 2).num_steps
    finally:
        destroy_subgroup(group)
    return PairResult(rates, num_pushes, num_steps)


def check_op(context: RankContext, secs: float) -> PairResult:
    """Runs steps of the op with identity experts for about `secs` seconds and compares every result. Collective."""
    rank, world_size, device = context.rank, context.world_size, context.device
    num_experts, none = world_size * EXPERTS_PER_RANK, [None] * world_size
    ids = [_ids(source, num_experts) for source in range(world_size)]
    own_ids, weights = ids[rank].to(device), torch.ones(NUM_TOKENS, TOPK, device=device)
    workload = Workload(world_size, NUM_TOKENS, NUM_TOKENS, HIDDEN, TOPK, num_experts)
    # All ranks are running, so a late flag never comes.
    config = replace(make_config(workload, rank), first_timeout_secs=env.TIMEOUT_SECS.get())
    with Arena(context.group, device) as arena, EpDispatchCombineOp(config, arena=arena) as op:

        def step(number: int) -> None:
            tokens = [_tokens(source, number) for source in range(world_size)]
            sent = dispatch_reference(tokens, none, none, ids, num_experts=num_experts, max_num_tokens=NUM_TOKENS)
            expert_rows = [each.valid_rows(each.tokens) for each in sent]
            want = combine_reference(expert_rows, sent, [NUM_TOKENS] * world_size, torch.bfloat16)[rank]
            rows, _, _, _, count = op.dispatch(tokens[rank].to(device), weights, None, own_ids)
            rows = rows.clone()
            _require(torch.equal(rows[: int(count)].cpu(), expert_rows[rank]), f"dispatch of step {number}", rank)
            result, _ = op.combine(rows, None, own_ids)
            _require(torch.equal(result[:NUM_TOKENS].cpu(), want), f"combine of step {number}", rank)
            op.check()

        return PairResult(num_steps=_repeat(step, arena.rendezvous, secs)[1])


def _push(context: RankContext, secs: float) -> tuple[tuple[float, float], int]:
    """Returns the rates both ways in 1e9 bytes per second, and the number of pushes."""
    rendezvous = Rendezvous(context.group)
    there, back = (_push_one_way(context, rendezvous, source, secs / 2) for source in range(2))
    num_bytes = PUSH_BYTES[context.device.type]
    return (num_bytes / there[0] / 1e3, num_bytes / back[0] / 1e3), there[1] + back[1]


def _push_one_way(context: RankContext, rendezvous: Rendezvous, source: int, secs: float) -> tuple[float, int]:
    """Returns the microseconds of a push from rank `source` of the two, and the number of pushes."""
    kind = context.device.type
    num_vectors = PUSH_BYTES[kind] // VECTOR_BYTES
    vectors = torch.zeros(2, 2, dtype=torch.int64)
    vectors[source, 1 - source] = num_vectors
    with contextlib.closing(Push(context, rendezvous, vectors)) as made:

        def push(number: int) -> None:
            made.push(PUSH_LAUNCH[kind])
            if kind == "cuda":
                torch.cuda.synchronize(context.device)
            if number == 0:
                _check_flag(made, context)

        us, count = _repeat(push, rendezvous, secs)
        _check_flag(made, context)
        if context.rank != source:
            want = pattern(source, 0, num_vectors, context.device)
            # No name for a view of the landing area: it would outlive the memory.
            is_right = torch.equal(made.landing.view(torch.int32), want)
            _require(is_right, f"{PUSH_BYTES[kind]} bytes pushed", context.rank)
        rendezvous.barrier("pushed one way")
        return us, count


def _check_flag(made: Push, context: RankContext) -> None:
    if int(made.state[GAVE_UP]):
        raise RankTimeoutError("the peer's flag", "a flag that did not come", missing_ranks=(1 - context.rank,))


def _repeat(work: Callable[[int], None], rendezvous: Rendezvous, secs: float) -> tuple[float, int]:
    """Calls `work` as often as fits into `secs`, equally often on all ranks; returns microseconds and the number."""

    def seconds_of(numbers: range) -> float:
        start = time.perf_counter()
        for number in numbers:
            work(number)
        seconds: list[float] = rendezvous.exchange("seconds", time.perf_counter() - start)
        return max(seconds)

    # The first call compiles; the second shows how long one takes.
    seconds_of(range(1))
    rounds = int(min(MAX_ROUNDS, max(1, secs / seconds_of(range(1, 2)))))
    return seconds_of(range(2, 2 + rounds)) / rounds * 1e6, rounds + 2


def _ids(rank: int, num_experts: int) -> torch.Tensor:
    """Returns ids [NUM_TOKENS, TOPK] of a rank's tokens: all ranks get some, and some tokens name one rank twice."""
    first = torch.arange(NUM_TOKENS, dtype=torch.int32) + rank
    return torch.stack((first, first * 2 + 1), 1) % num_experts


def _tokens(rank: int, step: int) -> torch.Tensor:
    rows = torch.arange(NUM_TOKENS)[:, None] * 13 + torch.arange(HIDDEN)[None] * 7 + rank * 97 + step * 31
    return (rows % VALUES).bfloat16()


def _require(right: bool, what: str, rank: int) -> None:
    if not right:
        found = f"something else at rank {rank} of the group"
        raise CheckFailedError(f"{what} to arrive as it was sent", found, REMEDY)
