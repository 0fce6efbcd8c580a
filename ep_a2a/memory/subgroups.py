"""Makes process groups of some ranks of a group; only those ranks take part."""

import contextlib
import functools
import secrets
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a import clock
from ep_a2a.errors import ConfigError, RankTimeoutError, UnsupportedError
from ep_a2a.memory.device_groups import is_rank_gone
from ep_a2a.memory.peers import BEAT_SECS, begun
from ep_a2a.memory.rendezvous import DEFAULT_TIMEOUT_SECS, Rendezvous

CONNECT_PATIENCE_SECS = 2.0
"""Members met a moment ago, so they give up at about the same time."""


def make_subgroup(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    timeout_secs: float = DEFAULT_TIMEOUT_SECS,
    *,
    store: distributed_c10d.Store | None = None,
) -> dist.ProcessGroup:
    """Makes a gloo group of some ranks of `parent`. Collective over these ranks only.

    new_group needs every process of the job; with its use_local_synchronization, members that belong to different
    numbers of groups wait for each other under different names (torch 2.13). Here members meet in the parent's store.

    The group is registered with torch: torch.distributed, Rendezvous and symmetric memory take it. It moves CPU
    tensors; `DeviceGroups(group)` makes an NCCL communicator of the same ranks when a CUDA tensor first comes.

    Args:
        parent: a registered group that this process belongs to; any backend.
        ranks: ranks of `parent`, this one among them; `ranks[i]` becomes rank i. Equal on all members, which make
            the groups of these ranks in the same order. Disjoint groups may be made at the same time.
        timeout_secs: how long to wait for the last member, and the default bound of the group's collectives.
        store: where the members meet, from now on; None is the parent's. Survivors of the process that held the
            parent's need another, a TCPStore of one of them.

    Raises:
        ConfigMismatchError: a member's package has another wire format.
        ConfigError: `ranks` is not a list of distinct ranks of `parent` with this rank among them.
        RankTimeoutError: members did not come, or did not connect within CONNECT_PATIENCE_SECS more. The error names
            them by their ranks in `parent`. The first member that gives up ends the call on all members that are
            there; all of them may call again.
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
    meeting = Rendezvous(parent, timeout_secs, ranks=ranks, store=store)
    with meeting.telling():
        name = meeting.exchange("name of a subgroup", secrets.token_hex(8))[0]
        deadline = clock.now() + timeout_secs + CONNECT_PATIENCE_SECS
        # gloo may wait for a key, which occupies the connection to the store
        own_store = (meeting.peers.group_store if store is None else store).clone()  # type: ignore[attr-defined]
        connect = functools.partial(
            _make_group, parent, ranks, f"ep_a2a_{name}", timedelta(seconds=timeout_secs), own_store
        )
        failure: RuntimeError | None = None
        with contextlib.ExitStack() as undo:
            try:
                group = _while_all_live(connect, meeting)
                undo.callback(destroy_subgroup, group)
            except RuntimeError as error:
                if not is_rank_gone(error):
                    raise
                failure = error
            meeting.timeout_secs = max(0.0, deadline - clock.now())
            # gloo does not say which connection failed, and a member may be connected to all where others are not
            texts = meeting.exchange("connections of a subgroup", failure and str(failure))
            if not any(texts):
                undo.pop_all()
                return group
        raise RankTimeoutError(
            f"ranks {list(ranks)} to connect within {timeout_secs:g} s",
            "; ".join(f"rank {rank} failed: {text}" for rank, text in zip(ranks, texts, strict=True) if text),
            "Check that these ranks are alive and reach each other (GLOO_SOCKET_IFNAME).",
        ) from failure


def _while_all_live(connect: Callable[[], dist.ProcessGroup], meeting: Rendezvous) -> dist.ProcessGroup:
    """Returns the group that `connect` makes, in a thread: gloo itself would wait for a dead member until its time-out.

    Raises:
        RuntimeError: of gloo, or that a member has ended or told an error; the thread is left behind then.
    """
    connecting = begun(connect)
    while not connecting.done() and not meeting.is_broken:
        futures.wait([connecting], BEAT_SECS)
    if not connecting.done():
        raise RuntimeError("closed by peer: a member's process has ended, or it has told an error")
    return connecting.result()


def destroy_subgroup(group: dist.ProcessGroup) -> None:
    """Ends a group of `make_subgroup`; local. Does nothing where it, or the default group, is gone already.

    Memory that was allocated over it stays valid. Where a collective is pending, the last reference to the group
    blocks until that has timed out.
    """
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def _make_group(
    parent: dist.ProcessGroup, ranks: tuple[int, ...], name: str, timeout: timedelta, store: distributed_c10d.Store
) -> dist.ProcessGroup:
    """Makes the group as torch's new_group does, without its barrier."""
    global_ranks = [dist.get_global_rank(parent, rank) for rank in ranks]
    make: Any = distributed_c10d._new_process_group_helper
    try:
        group: dist.ProcessGroup = make(
            group_size=len(ranks),
            group_rank=ranks.index(dist.get_rank(parent)),
            global_ranks_in_group=global_ranks,
            # with NCCL here, torch would split the default group's communicator, which all its ranks must do
            backend=dist.Backend("gloo"),
            store=store,
            group_name=name,
            timeout=timeout,
            group_desc="ep_a2a subgroup",
        )[0]
    except TypeError as error:
        raise UnsupportedError(
            "torch 2.11 to 2.15, whose process groups can be made one by one",
            f"torch {torch.__version__}: {error}",
            "Use another torch, or the allgather_reducescatter backend.",
        ) from error
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(global_ranks)}
    return group
