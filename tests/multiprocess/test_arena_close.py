"""Who waits for whom when an arena is closed."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ep_a2a import shmem
from ep_a2a.kernels.layout import Region
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory import arena as arena_module
from ep_a2a.memory.arena import Arena, BlockSizes
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, make_op, run_step
from tests.late import last_of_those_who_wait

SIZES = BlockSizes(512, {"dispatch": 1024}, 64, {"result": 128}, record_words=8)
LATE_RANK = 1
LONG_PATIENCE_SECS, AT_ONCE_SECS = 60.0, 30.0
"""A close of long patience that takes less waits for nobody in vain."""

Span = tuple[float, float]
"""Start and end, by time.monotonic(), which is one clock for all ranks."""


def span_of(close: Callable[[], None], patience_secs: float) -> Span:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "CLOSE_PATIENCE_SECS", patience_secs)
        start = time.monotonic()
        close()
        return start, time.monotonic()


def seconds_of(close: Callable[[], None], patience_secs: float) -> float:
    start, end = span_of(close, patience_secs)
    return end - start


def assert_all_wait_for_the_late_rank(spans: list[Span]) -> None:
    late = spans[LATE_RANK][0]
    for start, end in spans:
        assert end >= late
        assert end - start < AT_ONCE_SECS


def close_when_all_is_well(context: RankContext) -> Span:
    arena = Arena(context.group, context.device)
    arena.acquire("key", 0, SIZES)
    with last_of_those_who_wait(context, LATE_RANK, "a close"):
        return span_of(arena.close, LONG_PATIENCE_SECS)


def test_all_wait_for_a_late_rank(ranks):
    assert_all_wait_for_the_late_rank(ranks(close_when_all_is_well, 3))


def test_an_arena_without_memory_asks_nobody(ranks):
    assert max(ranks(close_an_unused_arena, 2)) < AT_ONCE_SECS


def close_an_unused_arena(context: RankContext) -> float:
    arena = Arena(context.group, context.device)
    # the late rank never closes
    return 0.0 if context.rank == LATE_RANK else seconds_of(arena.close, LONG_PATIENCE_SECS)


def finalize_a_world_of_allocations(context: RankContext) -> Span:
    torch._C._distributed_c10d._register_process_group("world of allocations", context.group)
    shmem.shmem_torch_process_group_init("world of allocations", context.device)
    shmem.shmem_malloc(64)
    with last_of_those_who_wait(context, LATE_RANK, "the end of a world"):
        span = span_of(shmem.shmem_finalize, LONG_PATIENCE_SECS)
    torch._C._distributed_c10d._unregister_process_group("world of allocations")
    return span


def test_all_wait_where_only_the_program_has_allocated(ranks):
    assert_all_wait_for_the_late_rank(ranks(finalize_a_world_of_allocations, 3))


def close_in_the_middle(context: RankContext, case: Case, how: str) -> float:
    """Every rank has a reason of its own to ask nobody, and the late rank does not close before the others have."""
    arena = Arena(context.group, context.device)
    others = Rendezvous(context.group)
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

    def close() -> None:
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

    if context.rank == LATE_RANK:
        others.barrier("the others have closed")
    seconds = seconds_of(close, LONG_PATIENCE_SECS)
    if context.rank != LATE_RANK:
        others.barrier("the others have closed")
    return seconds


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
