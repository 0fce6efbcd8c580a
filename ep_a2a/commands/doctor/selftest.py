"""Run the self-test: every two ranks push bytes and flags to each other and run the op; then all ranks together."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ep_a2a import env
from ep_a2a.commands import messages
from ep_a2a.commands.doctor.checks import Finding, error, note, ok, warning
from ep_a2a.commands.measure.push import LINKS_REMEDY, VECTOR_BYTES, Push, PushLaunch
from ep_a2a.errors import CheckFailedError, RankTimeoutError
from ep_a2a.managers.make_op import make_op
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.reference import combine_reference, dispatch_reference
from ep_a2a.testing.launch import RankFailure, RankPool
from ep_a2a.testing.worker import RankContext

PAIR_SECS = 2.0
"""Seconds to test a pair."""
LIMIT_SECS = 240.0
"""For one pair, compilation included. EP_A2A_TIMEOUT_SECS bounds the wait for a flag or row that never comes."""
PUSH_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}
PUSH_LAUNCH = {"cpu": PushLaunch(1, 4096), "cuda": PushLaunch(132, 1024)}
NUM_STEPS, TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 3, 4, 64, 2, 2
VALUES = 251
"""Tokens hold integers below this, which bf16 and sums of two of them hold exactly."""
SLOW = 0.5
"""A pair with less than this share of the median rate gets a warning."""
CPU_NOTE = "on CPU, over shared memory, in Triton's interpreter: a functional check that says nothing about GPUs"
FLAGS_REMEDY = "Flags do not travel between these two: look at `nvidia-smi topo -m` and at native atomics."
OTHER_REMEDY = "Run it again with EP_A2A_LOG_LEVEL=INFO, and read the ranks' messages above."


@dataclass(frozen=True)
class Result:
    """What two ranks did, or all ranks together; `error` says why they failed, and `remedy` what to do.

    `gb_per_s` is 1e9 bytes per second, each way at once. All results of the pushes and steps were right.
    """

    gb_per_s: float = 0.0
    num_pushes: int = 0
    num_steps: int = 0
    error: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class SelfTest:
    """Results by name of the ranks; `note` says what rates do not tell on CPU or where ranks share GPUs, else ""."""

    note: str = ""
    results: dict[str, Result] = field(default_factory=dict)


# --- on each rank ---


def check_ranks(context: RankContext, ranks: tuple[int, ...], secs: float) -> Result | None:
    """Run steps of the op on some ranks of the pool, and before that pushes between them where they are two.

    Call it on all ranks of the pool; it returns None on the others.

    Args:
        context: this rank, among all of the pool.
        ranks: in ascending order.
        secs: how long to push.

    Raises:
        CheckFailedError: something arrived that had not been sent.
        RankTimeoutError: a flag did not come.
    """
    if context.rank not in ranks:
        return None
    group = make_subgroup(context.group, ranks)
    try:
        inside = RankContext(ranks.index(context.rank), len(ranks), context.device, group)
        gb_per_s, num_pushes = _push(inside, secs) if len(ranks) == 2 else (0.0, 0)
        _check_op(inside)
        return Result(gb_per_s, num_pushes, NUM_STEPS)
    finally:
        destroy_subgroup(group)


def _check_op(context: RankContext) -> None:
    """Run steps of the op with identity experts on all ranks, and compare each with reference.py. Collective."""
    rank, world_size, device, group = context.rank, context.world_size, context.device, context.group
    num_experts, none = world_size * EXPERTS_PER_RANK, [None] * world_size
    # All ranks get some tokens, and some tokens name one rank twice.
    first = [torch.arange(TOKENS, dtype=torch.int32) + source for source in range(world_size)]
    ids = [torch.stack((each, each * 2 + 1), 1) % num_experts for each in first]
    own_ids, weights = ids[rank].to(device), torch.ones(TOKENS, TOPK, device=device)
    with make_op(group, hidden_size=HIDDEN, num_experts=num_experts, topk=TOPK, max_tokens=TOKENS, device=device) as op:
        # All ranks are running, so a late flag never comes.
        op.set_timeout(env.TIMEOUT_SECS.get())
        for step in range(NUM_STEPS):
            tokens = [_tokens(source, step) for source in range(world_size)]
            sent = dispatch_reference(tokens, none, none, ids, num_experts=num_experts, step_tokens=TOKENS)
            expert_rows = [each.valid_rows(each.tokens) for each in sent]
            want = combine_reference(expert_rows, sent, [TOKENS] * world_size, torch.bfloat16)[rank]
            received = op.dispatch(tokens[rank].to(device), weights, None, own_ids)
            came = received.tokens[: int(received.total_recv)].cpu()
            _require(torch.equal(came, expert_rows[rank]), f"dispatch of step {step}", rank)
            result = op.combine(received.tokens.clone(), None, own_ids).tokens[:TOKENS].cpu()
            _require(torch.equal(result, want), f"combine of step {step}", rank)
            op.check()


def _tokens(rank: int, step: int) -> torch.Tensor:
    row, element = torch.arange(TOKENS)[:, None], torch.arange(HIDDEN)[None]
    return ((row * 13 + element * 7 + rank * 97 + step * 31) % VALUES).bfloat16()


def _push(context: RankContext, secs: float) -> tuple[float, int]:
    """Push between two ranks, each way at once; return 1e9 bytes per second of a way, and the pushes of both."""
    kind, rendezvous = context.device.type, Rendezvous(context.group)
    vectors = torch.tensor([[0, 1], [1, 0]]) * (PUSH_BYTES[kind] // VECTOR_BYTES)
    with contextlib.closing(Push(context, rendezvous, vectors)) as made:

        def seconds_of(num_pushes: int) -> float:
            start = time.perf_counter()
            for _ in range(num_pushes):
                made.push(PUSH_LAUNCH[kind])
            made.check_flags()
            seconds: list[float] = rendezvous.exchange("seconds", time.perf_counter() - start)
            return max(seconds)

        # The first push compiles; the second shows how long one takes.
        seconds_of(1)
        num_pushes = int(max(1, secs / seconds_of(1)))
        seconds = seconds_of(num_pushes)
        made.check_bytes()
        rendezvous.barrier("pushed")
    return num_pushes * PUSH_BYTES[kind] / seconds / 1e9, 2 * (num_pushes + 2)


def _require(right: bool, what: str, rank: int) -> None:
    if not right:
        found = f"something else at rank {rank} of the group"
        raise CheckFailedError(f"{what} to arrive as it was sent", found, LINKS_REMEDY)


# --- in the command ---


def run_selftest(
    device: str, num_ranks: int, secs: float = PAIR_SECS, body: Callable[..., Any] = check_ranks
) -> SelfTest:
    """Test all pairs of ranks one after another, then all ranks together; show progress.

    A pair that fails ends the processes; the next one gets new ones, so that failures do not spread.

    Args:
        device: "cpu" or "cuda".
        num_ranks: processes.
        secs: how long to push between a pair.
        body: what a rank does for a pair, and for all.
    """
    pairs = itertools.combinations(range(num_ranks), 2)
    parts = {f"ranks {', '.join(map(str, ranks))}": ranks for ranks in (*pairs, tuple(range(num_ranks)))}
    results, console = {}, messages.notices()
    with (
        console.status("testing") as status,
        RankPool(num_ranks, device=device, timeout_secs=LIMIT_SECS + secs) as pool,
    ):
        for number, (name, ranks) in enumerate(parts.items(), 1):
            status.update(f"testing {name}")
            try:
                results[name] = pool.run(body, ranks, secs)[ranks[0]]
            except RankFailure as failure:
                results[name] = _failed(failure)
            messages.note(f"{number}/{len(parts)} {name}", console)
    return SelfTest(CPU_NOTE if device == "cpu" else pool.note, results)


def _failed(failure: RankFailure) -> Result:
    """Return the result of a part in which a rank failed."""
    known = failure.expected_error
    if known is None:
        return Result(error=failure.summary, remedy=OTHER_REMEDY)
    remedy = FLAGS_REMEDY if isinstance(known, RankTimeoutError) else known.remedy
    return Result(error=f"{type(known).__name__}: expected {known.expected}; got {known.got}", remedy=remedy)


def judge(test: SelfTest) -> list[Finding]:
    """Return the findings of what the self-test measured: a line for each pair, and one for all ranks."""
    rates = [each.gb_per_s for each in test.results.values() if each.gb_per_s]
    usual = statistics.median(rates) if rates and not test.note else 0.0
    findings = [note("self-test", test.note)] if test.note else []
    for who, result in test.results.items():
        rate = f" ({result.gb_per_s:.3g} GB/s each way)" if usual else ""
        pushed = f"{result.num_pushes} pushes with flags{rate} and " if result.num_pushes else ""
        if result.error:
            findings.append(error(who, result.error, result.remedy))
        elif 0 < result.gb_per_s < SLOW * usual:
            remedy = "Look at `nvidia-smi nvlink -s` and `nvidia-smi topo -m`."
            findings.append(warning(who, f"{result.gb_per_s:.0f} GB/s, the median is {usual:.0f}", remedy))
        else:
            findings.append(ok(who, f"{pushed}{result.num_steps} steps of the op, all right"))
    if "ranks 0" in test.results:
        findings.append(note("self-test", "one rank has no peers: nothing was pushed", "--ranks 2 tries two."))
    return findings
