"""Makes process groups of some ranks of a group; only those ranks take part."""

from __future__ import annotations

import inspect
import itertools
import json
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a import clock
from ep_a2a.errors import ConfigError, RankTimeoutError, UnsupportedError
from ep_a2a.memory.device_groups import is_rank_gone
from ep_a2a.memory.peers import peers_of
from ep_a2a.memory.rendezvous import (
    DEFAULT_TIMEOUT_SECS,
    await_keys,
    did_not_come,
    parsed,
    require_one_version,
    store_must_answer,
    with_version,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.memory.peers import Peers

LABEL = "name of a subgroup"
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
    store = distributed_c10d._get_process_group_store(parent) if store is None else store
    with store_must_answer(LABEL, None):
        peers = peers_of(parent)
    with store_must_answer(LABEL, peers):
        meeting = _Meeting(peers, store, ranks, timeout_secs)
        name = meeting.meet()
        deadline = clock.now() + timeout_secs + CONNECT_PATIENCE_SECS
        group, failure = None, None
        try:
            group = _make_group(parent, ranks, f"ep_a2a_{name}", timedelta(seconds=timeout_secs), store)
        except RuntimeError as error:
            if not is_rank_gone(error):
                raise
            failure = error
        # gloo does not say which connection failed, and a member may be connected to all where others are not
        absent, all_are_connected = meeting.end(deadline, is_connected=group is not None)
        if group is not None and all_are_connected:
            return group
        if group is not None:
            destroy_subgroup(group)
        verdict = peers.part(absent)
    raise RankTimeoutError(
        f"ranks {list(ranks)} to connect within {timeout_secs:g} s",
        f"rank {own} failed: {failure}" if failure is not None else "others that had failed",
        "Check that these ranks are alive and reach each other (GLOO_SOCKET_IFNAME).",
        missing_ranks=verdict.missing,
        late_ranks=verdict.late,
    ) from failure


class _Meeting:
    """One meeting of the members of a subgroup, in the first round that nobody has decided yet.

    Each member says in the store that it is there. Whoever finds all members there decides that the round has met;
    whoever gives up decides that it has failed. The first decision counts, and every member follows it. Members that
    come later take part in the next round.

    Args:
        peers: the ranks of the parent group.
        store: where the members meet.
        ranks: the members, by their ranks in the parent group.
        timeout_secs: how long to wait for the last member.
    """

    def __init__(
        self, peers: Peers, store: distributed_c10d.Store, ranks: tuple[int, ...], timeout_secs: float
    ) -> None:
        self._peers, self._ranks, self._timeout_secs = peers, ranks, timeout_secs
        self._store = distributed_c10d.PrefixStore(f"ep_a2a/of/{','.join(map(str, ranks))}", store)
        self._round = next(number for number in itertools.count() if not self._store.check([f"{number}/decision"]))

    def meet(self) -> str:
        """Waits until all members are there, and returns a name that only this round has."""
        keys = self._keys("there")
        self._store.set(keys[self._own_place], json.dumps(with_version({})))
        deadline = clock.now() + self._timeout_secs
        try:
            absent = await_keys(self._store, keys, self._ranks, self._peers, deadline, self._is_decided)
        except BaseException:
            self._decide({"absent": [self._peers.rank]})
            raise
        # a member that is there and has ended since cannot connect
        absent = absent or tuple(rank for rank in self._peers.look() if rank in self._ranks)
        decision = self._decide({"absent": absent} if absent else {"name": secrets.token_hex(8)})
        if "name" not in decision:
            absent = tuple(decision["absent"])
            raise did_not_come(absent, self._peers.part(absent), LABEL, self._timeout_secs)
        require_one_version([parsed(bytes(self._store.get(key))) for key in keys], self._ranks)
        return str(decision["name"])

    def end(self, deadline: float, *, is_connected: bool) -> tuple[tuple[int, ...], bool]:
        """Says whether this member has connected, and hears the others, until a clock.now().

        Returns:
            The members that have not said anything, and whether all have connected.
        """
        keys = self._keys("connected")
        self._store.set(keys[self._own_place], str(is_connected))
        absent = await_keys(self._store, keys, self._ranks, self._peers, deadline)
        return absent, not absent and {bytes(each) for each in self._store.multi_get(keys)} == {b"True"}

    def _is_decided(self) -> bool:
        return self._store.check([self._key("decision")])

    def _decide(self, decision: dict[str, Any]) -> dict[str, Any]:
        """Decides on this round unless somebody has; returns the decision that counts."""
        found = self._store.compare_set(self._key("decision"), "", json.dumps(decision))
        decided: dict[str, Any] = json.loads(found)
        return decided

    @property
    def _own_place(self) -> int:
        return self._ranks.index(self._peers.rank)

    def _key(self, what: str) -> str:
        return f"{self._round}/{what}"

    def _keys(self, what: str) -> list[str]:
        return [f"{self._key(what)}/{place}" for place in range(len(self._ranks))]


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
    store: distributed_c10d.Store,
) -> dist.ProcessGroup:
    """Makes the group as torch's new_group does, without its barrier."""
    global_ranks = [dist.get_global_rank(parent, rank) for rank in ranks]
    arguments: dict[str, Any] = {
        "group_size": len(ranks),
        "group_rank": ranks.index(dist.get_rank(parent)),
        "global_ranks_in_group": global_ranks,
        # Only gloo: with NCCL here, torch would split the default group's communicator, which all its ranks must do.
        "backend": dist.Backend("gloo"),
        "store": store,
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
