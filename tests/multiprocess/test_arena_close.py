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


def span_of(close: Callable[[], None]) -> Span:
    """Of a close with long patience."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "CLOSE_PATIENCE_SECS", LONG_PATIENCE_SECS)
        start = time.monotonic()
        close()
        return start, time.monotonic()


def close_when_all_is_well(context: RankContext) -> Span:
    arena = Arena(context.group, context.device)
    arena.acquire("key", 0, SIZES)
    with last_of_those_who_wait(context, LATE_RANK, "a close"):
        return span_of(arena.close)


def finalize_a_world_of_allocations(context: RankContext) -> Span:
    torch._C._distributed_c10d._register_process_group("world of allocations", context.group)
    shmem.shmem_torch_process_group_init("world of allocations", context.device)
    shmem.shmem_malloc(64)
    with last_of_those_who_wait(context, LATE_RANK, "the end of a world"):
        span = span_of(shmem.shmem_finalize)
    torch._C._distributed_c10d._unregister_process_group("world of allocations")
    return span


@pytest.mark.parametrize("close", [close_when_all_is_well, finalize_a_world_of_allocations])
def test_all_wait_for_a_late_rank(ranks: Any, close: Callable[[RankContext], Span]) -> None:
    spans = ranks(close, 3)
    for start, end in spans:
        assert end >= spans[LATE_RANK][0]
        assert end - start < AT_ONCE_SECS


def close_an_unused_arena(context: RankContext) -> Span:
    arena = Arena(context.group, context.device)
    # the late rank never closes
    return (0.0, 0.0) if context.rank == LATE_RANK else span_of(arena.close)


def test_an_arena_without_memory_asks_nobody(ranks: Any) -> None:
    for start, end in ranks(close_an_unused_arena, 2):
        assert end - start < AT_ONCE_SECS


def close_in_the_middle(context: RankContext, case: Case, how: str) -> Span:
    """Every rank has a reason of its own to ask nobody, and the late rank does not close before the others have."""
    arena = Arena(context.group, context.device)
    others = Rendezvous(context.group)
    op = make_op(context, case, arena)
    run_step(case, op, 0, context.device)
    if "step" in how:
        Step.dispatch(case, op, 1, context.device)
    if how == "closed in a step":
        op.close()
    elif how == "told by a peer":
        op.memory.view(Region.POISON).fill_(1 << 16)
        op.close()
    elif how == "dropped in a step":
        del op
    arena.rendezvous.barrier("before the close")

    def close() -> None:
        closing: Any = arena
        if how == "exception in manager":
            closing = create_manager("ep_a2a", context.group)
            closing._arena = arena
        if how.startswith("exception"):
            with pytest.raises(ZeroDivisionError), closing:
                _ = 1 / 0
        else:
            arena.close()

    if context.rank == LATE_RANK:
        others.barrier("the others have closed")
    span = span_of(close)
    if context.rank != LATE_RANK:
        others.barrier("the others have closed")
    return span


@pytest.mark.parametrize(
    "how", ["open step", "closed in a step", "dropped in a step", "told by a peer", "exception", "exception in manager"]
)
def test_what_is_not_well_is_closed_alone(ranks: Any, how: str) -> None:
    for start, end in ranks(close_in_the_middle, 2, Case(world_size=2), how):
        assert end - start < AT_ONCE_SECS
