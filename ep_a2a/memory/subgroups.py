"""Makes process groups of some ranks of a group; only those ranks take part."""

from __future__ import annotations

import inspect
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.errors import ConfigError, ConfigMismatchError, RankTimeoutError, UnsupportedError
from ep_a2a.memory.device_groups import is_rank_gone
from ep_a2a.memory.muster import Muster
from ep_a2a.memory.rendezvous import DEFAULT_TIMEOUT_SECS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.memory.liveness import Liveness

CONNECT_PATIENCE_SECS = 2.0
"""Members met a moment ago, so they give up at about the same time."""


def make_subgroup(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    timeout_secs: float = DEFAULT_TIMEOUT_SECS,
    *,
    store: distributed_c10d.Store | None = None,
    liveness: Liveness | None = None,
) -> dist.ProcessGroup:
    """Makes a gloo group of some ranks of `parent`. Collective over these ranks only.

    new_group needs every process of the job; with its use_local_synchronization, members that belong to different
    numbers of groups wait for each other under different names (torch 2.13). Here members meet in the parent's store.

    The group is registered with torch: torch.distributed, Rendezvous and symmetric memory take it. It moves CPU
    tensors; `DeviceGroups(group)` makes an NCCL communicator of the same ranks when a CUDA tensor first comes.

    Args:
        parent: a registered group that this process belongs to; any backend.
        ranks: ranks of `parent`, this one among them; `ranks[i]` becomes rank i. Equal on all members, which make
            the groups of these ranks in the same order. A call that raises RankTimeoutError can be repeated, on any
            member as often as it likes: those who are there at the same time meet. Disjoint groups may be made at
            the same time.
        timeout_secs: how long to wait for the last member, and the default bound of the group's collectives.
        store: where the members meet, from now on; None is the parent's. Survivors of the process that held the
            parent's need another, a TCPStore of one of them.
        liveness: of `parent`, which tells members that are late from those that are gone. Without it both count as
            missing.

    Raises:
        ConfigMismatchError: a member's package has another wire format.
        ConfigError: `ranks` is not a list of distinct ranks of `parent` with this rank among them.
        RankTimeoutError: members did not come, or did not connect within CONNECT_PATIENCE_SECS more; the error names
            them by their ranks in `parent`.
        UnsupportedError: this version of torch makes groups in another way.
    """
    ranks = tuple(ranks)
    own, world_size = dist.get_rank(parent), dist.get_world_size(parent)
    if own not in ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < world_size for rank in ranks):
        raise ConfigError(
            f"distinct ranks below {world_size}, rank {own} among them",
            str(list(ranks)),
            "Call make_subgroup on the ranks of the subgroup only.",
        )
    muster = Muster(parent, timeout_secs, ranks, store)
    if liveness is not None:
        muster.tell_apart = liveness.tell_apart
    try:
        group = _meet_and_connect(muster, parent, ranks, store)
    except ConfigMismatchError:
        raise
    except BaseException:
        muster.end()
        raise
    muster.end()
    return group


def _meet_and_connect(
    muster: Muster, parent: dist.ProcessGroup, ranks: tuple[int, ...], store: distributed_c10d.Store | None
) -> dist.ProcessGroup:
    """Makes the group on all members, or an error on all."""
    meeting = muster.meet("name of a subgroup")
    deadline = time.monotonic() + muster.timeout_secs + CONNECT_PATIENCE_SECS
    group, failure = None, None
    try:
        # The name is new even after a restart of this job with the same store. torch keeps a group's symmetric memory
        # by name, beyond the end of the group.
        group = _make_group(parent, ranks, f"ep_a2a_{meeting}", timedelta(seconds=muster.timeout_secs), store)
    except RuntimeError as error:
        if not is_rank_gone(error):
            raise
        failure = error
    # gloo does not say which connection failed, and a member may be connected to all where others are not
    all_are_connected, absent = muster.tell(meeting, succeeded=group is not None, deadline=deadline)
    if group is not None and all_are_connected:
        return group
    if group is not None:
        destroy_subgroup(group)
    missing, late = muster.missing_and_late(absent)
    raise RankTimeoutError(
        f"ranks {list(ranks)} to connect within {muster.timeout_secs:g} s",
        f"rank {dist.get_rank(parent)} failed: {failure}" if failure is not None else "others that had failed",
        "Check that these ranks are alive and reach each other (GLOO_SOCKET_IFNAME).",
        missing_ranks=missing,
        late_ranks=late,
    ) from failure


def destroy_subgroup(group: dist.ProcessGroup) -> None:
    """Ends a group of `make_subgroup`; local. Does nothing where it, or the default group, is gone already.

    Memory that was allocated over it stays valid. Where a collective is pending, the last reference to the group
    blocks until that has timed out.
    """
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def _make_group(
    parent: dist.ProcessGroup,
    ranks: tuple[int, ...],
    name: str,
    timeout: timedelta,
    store: distributed_c10d.Store | None,
) -> dist.ProcessGroup:
    """Makes the group as torch's new_group does, without its barrier."""
    global_ranks = [dist.get_global_rank(parent, rank) for rank in ranks]
    arguments: dict[str, Any] = {
        "group_size": len(ranks),
        "group_rank": ranks.index(dist.get_rank(parent)),
        "global_ranks_in_group": global_ranks,
        # Only gloo: with NCCL here, torch would split the default group's communicator, which all its ranks must do.
        "backend": dist.Backend("gloo"),
        "store": distributed_c10d._get_process_group_store(parent) if store is None else store,
        "group_name": name,
        "timeout": timeout,
        "group_desc": "ep_a2a subgroup",
    }
    make: Any = distributed_c10d._new_process_group_helper
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise UnsupportedError(
            "torch 2.11 to 2.15, whose process groups can be made one by one",
            f"torch {torch.__version__}: {error}",
            "Use another torch, or the allgather_reducescatter backend.",
        ) from error
    group: dist.ProcessGroup = make(**arguments)[0]
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(global_ranks)}
    return group
