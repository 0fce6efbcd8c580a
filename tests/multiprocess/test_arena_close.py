"""Who waits for whom when an arena is closed."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ep_a2a import shmem
from ep_a2a.kernels.layout import Region
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory import arena as arena_module
from ep_a2a.memory.arena import Arena, BlockSizes
from tests.cases.op_cases import Case, Step, make_op, run_step
from tests.messages import messages_of

if TYPE_CHECKING:
    from ep_a2a.testing import RankContext

SIZES = BlockSizes(512, {"dispatch": 1024}, 64, {"result": 128}, record_words=8)
LATE_RANK = 1
LATE_SECS, PATIENCE_SECS, AT_ONCE_SECS = 1.0, 2.0, 0.8


def timed_close(arena: Arena) -> float:
    start = time.monotonic()
    arena.close()
    return time.monotonic() - start


def close_when_all_is_well(context: RankContext) -> float:
    arena = Arena(context.group, context.device)
    arena.acquire("key", 0, SIZES)
    arena.rendezvous.barrier("all are here")
    if context.rank == LATE_RANK:
        time.sleep(LATE_SECS)
    return timed_close(arena)


def test_all_wait_for_a_late_rank(ranks):
    for rank, seconds in enumerate(ranks(close_when_all_is_well, 3)):
        assert (seconds > LATE_SECS / 2) == (rank != LATE_RANK), seconds


def test_an_arena_without_memory_asks_nobody(ranks):
    assert all(ranks(close_an_unused_arena, 2))


def close_an_unused_arena(context: RankContext) -> bool:
    if context.rank == LATE_RANK:
        Arena(context.group, context.device)
        return True
    return timed_close(Arena(context.group, context.device)) < AT_ONCE_SECS


def finalize_a_world_of_allocations(context: RankContext) -> float:
    torch._C._distributed_c10d._register_process_group("world of allocations", context.group)
    shmem.shmem_torch_process_group_init("world of allocations", context.device)
    shmem.shmem_malloc(64)
    if context.rank == LATE_RANK:
        time.sleep(LATE_SECS)
    start = time.monotonic()
    shmem.shmem_finalize()
    torch._C._distributed_c10d._unregister_process_group("world of allocations")
    return time.monotonic() - start


def test_all_wait_where_only_the_program_has_allocated(ranks):
    for rank, seconds in enumerate(ranks(finalize_a_world_of_allocations, 3)):
        assert (seconds > LATE_SECS / 2) == (rank != LATE_RANK), seconds


def one_never_closes(context: RankContext) -> tuple[float, list[str], bool]:
    arena = Arena(context.group, context.device)
    block = arena.acquire("key", 0, SIZES).symmetric["own"]
    with pytest.MonkeyPatch.context() as patch, messages_of(arena_module.logger, logging.INFO) as texts:
        patch.setattr(arena_module, "CLOSE_PATIENCE_SECS", PATIENCE_SECS)
        seconds = 0.0 if context.rank == LATE_RANK else timed_close(arena)
    again = Arena(context.group, context.device)
    again.rendezvous.barrier("a later arena is not disturbed")
    closed = block.closed
    arena.close(alone=True)
    return seconds, texts, closed


def test_a_rank_that_does_not_close_is_named_and_not_waited_for_long(ranks):
    for rank, (seconds, texts, closed) in enumerate(ranks(one_never_closes, 3)):
        if rank == LATE_RANK:
            assert not closed
            continue
        assert PATIENCE_SECS / 2 < seconds < 2 * PATIENCE_SECS + 1
        assert texts == [f"rank {rank} closes alone: no sign of ranks {LATE_RANK}"]
        assert closed


def close_in_the_middle(context: RankContext, case: Case, how: str) -> float:
    """Every rank has a reason of its own to ask nobody, and the late rank does not close before the others have."""
    arena = Arena(context.group, context.device)
    op = make_op(context, case, arena)
    run_step(case, op, 0, context.device)
    if how == "open step":
        Step.dispatch(case, op, 1, context.device)
    elif how == "closed in a step":
        Step.dispatch(case, op, 1, context.device)
        op.close()
    elif how == "failure":
        op.memory.record[0] = 1
    elif how == "told by a peer":
        op.memory.view(Region.POISON).fill_(1 << 16)
        op.close()
    elif how == "dropped in a step":
        Step.dispatch(case, op, 1, context.device)
        del op
    arena.rendezvous.barrier("before the close")
    if context.rank == LATE_RANK:
        time.sleep(LATE_SECS)
    start = time.monotonic()
    if how == "exception":
        with pytest.raises(ZeroDivisionError), arena:
            _ = 1 / 0
    elif how == "exception in manager":
        manager = create_manager("ep_a2a", context.group)
        manager._arena = arena
        with pytest.raises(ZeroDivisionError), manager:
            _ = 1 / 0
    else:
        arena.close()
    return time.monotonic() - start


@pytest.mark.parametrize(
    "how",
    [
        "open step",
        "closed in a step",
        "dropped in a step",
        "failure",
        "told by a peer",
        "exception",
        "exception in manager",
    ],
)
def test_what_is_not_well_is_closed_alone(ranks: Any, how: str) -> None:
    assert max(ranks(close_in_the_middle, 2, Case(world_size=2), how)) < AT_ONCE_SECS
