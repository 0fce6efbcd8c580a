"""Process groups of some ranks, made by these ranks alone."""

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.errors import ConfigError, RankTimeoutError
from ep_a2a.memory import subgroups
from ep_a2a.memory.arena import allocate_symmetric
from ep_a2a.memory.device_groups import DeviceGroups
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.testing import RankContext, RankFailure, RankPool

SHORT_TIMEOUT_SECS = 6.0
"""Longer than ranks of a busy machine are apart that left a barrier together."""
NEVER_SECS = 3600.0
"""Longer than a pool waits for its ranks."""


def part_of(context: RankContext, parts: Sequence[Sequence[int]]) -> Sequence[int] | None:
    return next((part for part in parts if context.rank in part), None)


def use(group: dist.ProcessGroup, ranks: Sequence[int], own: int) -> None:
    """Everything that a subgroup is for; `own` is this rank in the group that `ranks` are of."""
    place, size = list(ranks).index(own), len(ranks)
    assert (dist.get_rank(group), dist.get_world_size(group)) == (place, size)
    total = torch.tensor([own + 1])
    dist.all_reduce(total, group=group)
    assert total.item() == sum(rank + 1 for rank in ranks)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own, group=group)
    assert gathered == list(ranks)
    rendezvous = Rendezvous(group)
    assert rendezvous.exchange("ranks", own) == list(ranks)
    assert DeviceGroups(group).of(torch.device("cpu")) is group
    with contextlib.closing(allocate_symmetric(rendezvous, torch.device("cpu"), 4096)) as memory:
        assert len(memory.peer_addresses) == size
    # what symmetric memory asks torch for
    assert distributed_c10d._resolve_process_group(group.group_name) is group


# --- all of it, in many shapes ---


def make_and_use(context: RankContext, parts: Sequence[Sequence[int]]) -> str | None:
    ranks = part_of(context, parts)
    if ranks is None:
        return None
    group = make_subgroup(context.group, ranks)
    use(group, ranks, context.rank)
    assert dist.get_process_group_ranks(group) == list(ranks)
    name = group.group_name
    destroy_subgroup(group)
    destroy_subgroup(group)
    assert group not in distributed_c10d._world.pg_map
    with pytest.raises(RuntimeError):
        distributed_c10d._resolve_process_group(name)
    return name


@pytest.mark.parametrize(
    "parts",
    [[(0, 1, 2, 3)], [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(3, 0)], [(2,)], [(1, 3, 2), (0,)], [(0,), (1,), (2,), (3,)]],
    ids=str,
)
def test_disjoint_groups_at_once(ranks, parts):
    names = ranks(make_and_use, 4, parts)
    for part in parts:
        assert len({names[rank] for rank in part}) == 1
    assert len({name for name in names if name}) == len(parts)


# --- where new_group's local synchronisation hangs ---


def make_with_extra_groups(context: RankContext) -> None:
    """Ranks 0 and 1 have a group of torch's that ranks 2 and 3 have not, and rank 0 two of ours more than rank 2."""
    extra = dist.new_group([0, 1], backend="gloo", use_local_synchronization=True) if context.rank < 2 else None
    own = [make_subgroup(context.group, (0, 1)) for _ in range(2)] if context.rank < 2 else []
    ranks = (context.rank % 2, context.rank % 2 + 2)
    group = make_subgroup(context.group, ranks, timeout_secs=20)
    use(group, ranks, context.rank)
    for other in [group, *own]:
        destroy_subgroup(other)
    if extra is not None:
        dist.destroy_process_group(extra)


def test_members_with_different_numbers_of_groups(ranks):
    ranks(make_with_extra_groups, 4)


def make_of_a_part(context: RankContext) -> None:
    """The parent is itself a subgroup, whose ranks are not the job's."""
    if context.rank == 0:
        return
    parent = make_subgroup(context.group, (3, 1, 2))
    own = dist.get_rank(parent)
    if own != 1:
        group = make_subgroup(parent, (2, 0))
        use(group, (2, 0), own)
        assert dist.get_process_group_ranks(group) == [2, 3]
        destroy_subgroup(group)
    use(parent, (3, 1, 2), context.rank)
    destroy_subgroup(parent)


def test_a_subgroup_of_a_subgroup(ranks):
    ranks(make_of_a_part, 4)


# --- what is refused ---


def ask_for_the_impossible(context: RankContext) -> None:
    other = 1 - context.rank
    for wrong in ([other], [context.rank] * 2, [context.rank, 2], [context.rank, -1], []):
        with pytest.raises(ConfigError, match=f"distinct ranks below 2, rank {context.rank} among them"):
            make_subgroup(context.group, wrong)
    use(context.group, (0, 1), context.rank)


def test_impossible_ranks_are_refused_at_once(ranks):
    ranks(ask_for_the_impossible, 2)


def wait_for_one_that_stays_away(context: RankContext) -> None:
    Rendezvous(context.group).barrier("all are here")
    if context.rank == 2:
        return
    ranks = (0, 2) if context.rank == 0 else (2, 1, 3)
    # the first member that gives up ends the wait of all
    timeout_secs = NEVER_SECS if context.rank == 3 else SHORT_TIMEOUT_SECS
    with pytest.raises(RankTimeoutError, match="no sign of rank 2") as caught:
        make_subgroup(context.group, ranks, timeout_secs)
    assert caught.value.late_ranks == (2,)


def test_a_member_that_does_not_come_is_named():
    # ranks of their own: those that did meet would wait for rank 2 when a later test makes these subgroups again
    with RankPool(4) as pool:
        pool.run(wait_for_one_that_stays_away)


def meet_at_last(context: RankContext) -> list[str]:
    """Rank 0 gives up twice before rank 1 comes; then rank 1 gives up; at last both are there. What rank 0 saw."""
    everyone, seen = Rendezvous(context.group), []
    for number, comers in enumerate(((0,), (0,), (1,), (0, 1), (0, 1))):
        everyone.barrier(f"try {number}")
        if context.rank not in comers:
            continue
        try:
            group = make_subgroup(context.group, (0, 1), SHORT_TIMEOUT_SECS / 4 if len(comers) == 1 else 60.0)
        except RankTimeoutError as error:
            seen.append(f"missed {error.late_ranks}")
        else:
            use(group, (0, 1), context.rank)
            destroy_subgroup(group)
            seen.append("met")
    return seen


def test_members_that_missed_each_other_meet_later(ranks):
    assert ranks(meet_at_last, 2) == [["missed (1,)", "missed (1,)", "met", "met"], ["missed (0,)", "met", "met"]]


def die_between_meeting_and_connecting(context: RankContext) -> None:
    Rendezvous(context.group).barrier("all are here")
    if context.rank == 1:
        subgroups._make_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    make_subgroup(context.group, (0, 1, 2), timeout_secs=NEVER_SECS)


def test_a_member_that_dies_while_connecting_is_named_at_once():
    with RankPool(3, grace_secs=60) as pool, pytest.raises(RankFailure) as caught:
        pool.run(die_between_meeting_and_connecting)
    assert caught.value.unfinished == ()
    for rank in (0, 2):
        error = caught.value.errors[rank]
        assert (error.missing_ranks, error.late_ranks) == ((1,), ())
