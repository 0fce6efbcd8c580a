"""Steps of ops with on_rank_loss="mask", each against an oracle that knows which ranks this one has masked."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import ConfigError, RankTimeoutError, UnknownNameError, UnsupportedError
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from tests.replay import CapturedStep
from tests.waiting import await_until

HIDDEN, TOPK, MAX_TOKENS = 16, 3, 5
POINTS = ("before dispatch", "between halves of dispatch", "before combine", "between halves of combine")
LOST_AT, NUM_STEPS = 2, 5
"""The step in which a rank is lost, and steps in all."""
NEVER_SECS, MASK_AFTER_SECS = 1000.0, 10.0
"""mask_after_secs where a death is seen, and where a rank stops: a busy machine takes less for a step."""


@dataclass(frozen=True)
class Lost:
    """Which ranks are lost, where in a step, and by which signal; and changes of the config."""

    victims: tuple[int, ...]
    point: str
    by: int = signal.SIGKILL
    changes: tuple[tuple[str, Any], ...] = ()


def op_of(
    context: Any, arena: Arena, kind: Any = EpDispatchCombineOp, index: int | None = None, **changes: Any
) -> EpDispatchCombineOp:
    """An op of two experts a rank, whose rows are float32: small numbers have exact sums."""
    world_size = context.world_size
    sizes = {"rank": context.rank, "world_size": world_size, "gpu_per_node": world_size}
    sizes |= {"hidden_dim": HIDDEN, "scale_dim": 0, "scale_type_size": 0, "max_token_type_size": 4}
    sizes |= {"max_num_inp_token_per_rank": MAX_TOKENS, "num_experts_per_rank": 2, "num_experts_per_token": TOPK}
    options = {"data_type": torch.float32, "layout": "rank_major", "on_rank_loss": "mask"}
    config: Any = EpDispatchCombineConfig
    found: EpDispatchCombineOp = kind(
        config(**sizes | options | {"mask_after_secs": NEVER_SECS} | changes), arena=arena, index=index
    )
    return found


def draw(op: EpDispatchCombineOp, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, ids) of this rank; fewer tokens on some ranks, and dropped slots."""
    config = op.config
    drawn = torch.Generator().manual_seed(100 * step + config.rank)
    num_tokens = (MAX_TOKENS, 3, 4, 0, 1)[(config.rank + step) % 5]
    tokens = torch.randint(-8, 8, (num_tokens, config.hidden_dim), generator=drawn).float()
    ids = torch.rand(num_tokens, config.total_experts, generator=drawn).topk(TOPK).indices.int()
    ids[::3, 1] = -1
    return tokens.to(op.device), ids.to(op.device)


def wanted(tokens: torch.Tensor, ids: torch.Tensor, living: tuple[int, ...], *, by_slot: bool) -> torch.Tensor:
    """What comes back where rank r multiplies rows by r + 1: once for each rank, or for each slot."""
    owners = torch.where(ids >= 0, ids // 2, -1)
    total = torch.zeros_like(tokens)
    for rank in living:
        times = (owners == rank).sum(-1, keepdim=True)
        total += tokens * (rank + 1) * (times if by_slot else times > 0)
    return total


def take_step(op: EpDispatchCombineOp, number: int, at: Callable[[str], None] = lambda _: None) -> bool:
    """Takes a step and checks its result. Returns whether ranks were masked since the step before.

    Then tokens of this step with slots at these ranks may lack their parts. All other tokens are those of a step of
    the ranks that were not masked before it, whatever the other ranks knew.

    Args:
        at: called at each of POINTS.
    """
    by_slot, before = op.config.layout == "expert_major", op.active_ranks()
    tokens, ids = draw(op, number)
    weights = torch.ones(ids.shape, device=op.device) if by_slot else None
    # the exchange of weights is one more launch that waits
    late_weights = weights if isinstance(op, CombineTimeWeightsOp) else None
    at(POINTS[0])
    op.dispatch_send(tokens, weights if late_weights is None else None, None, ids)
    at(POINTS[1])
    rows = op.dispatch_recv().tokens * (op.config.rank + 1)
    at(POINTS[2])
    op.combine_send(rows, late_weights, None)
    at(POINTS[3])
    result = op.combine_recv().tokens[: len(tokens)]
    return check_step(op, number, tokens, ids, before, result)


def check_step(
    op: EpDispatchCombineOp,
    number: int,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    before: tuple[int, ...],
    result: torch.Tensor,
) -> bool:
    """The second part of take_step.

    Args:
        before: the ranks that this one had not masked when the step began.
    """
    by_slot = op.config.layout == "expert_major"
    is_faulty = bool(op.step_fault())
    op.check()
    assert is_faulty or not any(op.recv_counts[rank] for rank in {*range(op.config.world_size)} - {*before}), number
    assert result.isfinite().all()
    lost = torch.tensor(sorted({*before} - {*op.active_ranks()}), dtype=torch.int32, device=op.device)
    is_whole = ~((ids >= 0) & torch.isin(ids // 2, lost)).any(-1) if is_faulty else slice(None)
    assert torch.equal(result[is_whole], wanted(tokens, ids, before, by_slot=by_slot)[is_whole]), (number, before, lost)
    return is_faulty


def go_on(context: Any, lost: Lost) -> dict[str, Any] | None:
    """Takes steps, in one of which ranks are lost. Returns seconds of that step and the next; None on a masked rank."""
    secs = NEVER_SECS if lost.by == signal.SIGKILL else MASK_AFTER_SECS
    left = tuple(sorted({*range(context.world_size)} - {*lost.victims}))
    pids: list[int] = [0] * context.world_size
    dist.all_gather_object(pids, os.getpid(), group=context.group)
    times, num_faults = [], 0
    with Arena(context.group, context.device) as arena:
        op = op_of(context, arena, **{"mask_after_secs": secs} | dict(lost.changes))
        for step in range(NUM_STEPS):

            def be_lost(point: str, is_lost: bool = step == LOST_AT and context.rank in lost.victims) -> None:
                if is_lost and point == lost.point:
                    os.kill(os.getpid(), lost.by)

            start = time.monotonic()
            try:
                is_faulty = take_step(op, step, be_lost)
            except RankTimeoutError as error:
                # a rank that was stopped and goes on finds that it is masked
                if context.rank not in lost.victims or error.late_ranks != (context.rank,):
                    raise
                break
            times.append(time.monotonic() - start)
            if step == LOST_AT:
                await_until(lambda: op.active_ranks() == left, "masks")
            # a rank that is behind hears of the loss a step early, one that is ahead a step late
            assert not is_faulty or abs(step - LOST_AT) <= 1
            num_faults += is_faulty
        is_back = context.rank in lost.victims
        assert is_back or 1 <= num_faults <= len(lost.victims)
        if lost.by == signal.SIGSTOP:
            if context.rank == left[0]:
                for victim in lost.victims:
                    os.kill(pids[victim], signal.SIGCONT)
            # who has met again takes steps with the others again
            op.reset()
            assert not take_step(op, NUM_STEPS)
            assert len(op.active_ranks()) == context.world_size
    return None if is_back else {"secs": times[LOST_AT : LOST_AT + 2]}


def replay_on(context: Any, victim: int, point: str, changes: dict[str, Any]) -> None:
    """Replays one captured step; a rank dies before its replay of step LOST_AT, or with it. The others replay on."""
    left = tuple(sorted({*range(context.world_size)} - {victim}))
    with Arena(context.group, context.device) as arena:
        op = op_of(context, arena, **changes)
        tokens = torch.zeros(MAX_TOKENS, HIDDEN, device=op.device)
        ids = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32, device=op.device)
        weights = torch.ones(ids.shape, device=op.device) if op.config.layout == "expert_major" else None
        results: list[torch.Tensor] = []

        def body(call: Callable[[Callable[[], Any]], None]) -> None:
            got = op.dispatch(tokens, weights, None, ids).tokens
            rows = torch.empty_like(got)
            call(lambda: torch.mul(got, context.rank + 1, out=rows))
            results.append(op.combine(rows, None, None).tokens)

        body(lambda work: work())
        captured = CapturedStep(op, body)
        for step in range(NUM_STEPS):
            before, (drawn, slots) = op.active_ranks(), draw(op, step)
            tokens[: len(drawn)], ids[: len(drawn)] = drawn, slots
            ids[len(drawn) :] = -1
            is_victim = step == LOST_AT and context.rank == victim
            if is_victim and point == POINTS[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            captured.replay()
            if is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
            is_faulty = check_step(op, step, tokens, ids, before, results[-1])
            assert not is_faulty or abs(step - LOST_AT) <= 1
            if step == LOST_AT:
                await_until(lambda: op.active_ranks() == left, "masks")


def hear_early(context: Any, changes: dict[str, Any]) -> None:
    """Rank 1 dies when it has sent a step's rows, and the others hear of it before they begin that step."""
    with Arena(context.group, context.device) as arena:
        op = op_of(context, arena, **changes)
        take_step(op, 0)
        if context.rank == 1:
            take_step(op, 1, lambda point: os.kill(os.getpid(), signal.SIGKILL) if point == POINTS[1] else None)
        await_until(lambda: op.active_ranks() == (0, 2), "masks")
        # a rank that was behind has had this answer in step 0
        op.step_fault()
        assert not take_step(op, 1)


def wake(context: Any) -> None:
    """Rank 1 does not look at the others for so long that they mask it, as if it had been stopped; then it goes on."""
    with Arena(context.group, context.device) as arena:
        op = op_of(context, arena, mask_after_secs=2.0)
        for step in range(LOST_AT):
            take_step(op, step)
        is_masked = dist.PrefixStore("masked", arena.peers.group_store)
        if context.rank == 1:
            tokens, ids = draw(op, LOST_AT)
            # the thread that looks waits for this lock
            with arena.peers._reading:
                await_until(lambda: is_masked.check(["0", "2"]), "masks")
                with pytest.raises(RankTimeoutError, match="go on without it"):
                    op.dispatch_send(tokens, None, None, ids)
        else:
            take_step(op, LOST_AT)
            await_until(lambda: op.active_ranks() == (0, 2), "masks")
            is_masked.set(str(context.rank), "")


def close_early(context: Any) -> None:
    """Rank 2 dies; of the others rank 0 closes while rank 1 is in its last step, and waits for it."""
    with Arena(context.group, context.device) as arena:
        op = op_of(context, arena)
        take_step(op, 0)
        if context.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        await_until(lambda: op.active_ranks() == (0, 1), "masks")
        op.step_fault()
        meeting = dist.PrefixStore("ep_a2a/of/0,1", arena.peers.group_store)

        def be_late(point: str) -> None:
            if context.rank == 1 and point == POINTS[3]:
                await_until(lambda: meeting.check(["1/0"]), "the close of rank 0")

        assert not take_step(op, 1, be_late)


def refusals(context: Any) -> None:
    """Refusals before anything is built or launched; no memory of other configs' ops; reset takes all ranks back."""
    with Arena(context.group, context.device) as arena:
        for changes, match in (
            ({"layout": "compact"}, "'rank_major' or 'expert_major'"),
            ({"on_rank_loss": "ignore"}, "on_rank_loss"),
            ({"mask_after_secs": 0}, "mask_after_secs"),
        ):
            with pytest.raises((ConfigError, UnknownNameError), match=match):
                op_of(context, arena, **changes)
        op = op_of(context, arena)
        tokens, ids = draw(op, 0)
        with pytest.raises(UnsupportedError, match="Pass step_tokens=5, or"):
            op.dispatch(tokens, None, None, ids, step_tokens=[5] + [4] * (context.world_size - 1))
        # a masked rank that wakes stores into no memory of an op whose rows lie elsewhere
        for kind in ("mask", "fail"):
            blocks = [
                {*op_of(context, arena, index=0, on_rank_loss=kind, **more).memory.acquired.symmetric.values()}
                for more in ({}, {"max_num_inp_token_per_rank": MAX_TOKENS - 1})
            ]
            assert len(blocks[0] & blocks[1]) == (0 if kind == "mask" else 2)
        op.reset()
        arena.lose((), {0})
        assert op.active_ranks() == tuple(range(1, context.world_size))
        if context.rank == 0:
            with pytest.raises(RankTimeoutError, match="go on without it"):
                op.check()
        op.reset()
        op.check()
        assert len(op.active_ranks()) == context.world_size
        # a rank that was masked meanwhile closes, too
        arena.peers.masked = {context.rank}
