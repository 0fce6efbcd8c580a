"""Muster: the members of a group find each other, however often some of them have come in vain before."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from typing import TYPE_CHECKING, Any

from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.topology.facts import require_one_version, with_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch.distributed import distributed_c10d

POLL_SECS_PER_MEMBER = 0.001
LONGEST_POLL_SECS = 0.1
SUCCEEDED = "succeeded"
ABSENT = b""
"""The word of a member that waits no more."""


class Muster(Rendezvous):
    """A meeting of the members that are there at the same time, for one use.

    Each calls `meet`, then `tell` how it went on from there, which shows that all had met, and `end` in any case.

    A member writes a ticket that nobody has had before. Once it has read the tickets of all, it writes what it has
    read. The members have met when all have read the same tickets. Whoever leaves takes its ticket away. Nothing is
    counted, unlike in `exchange`, so members that have made more or fewer attempts than others meet all the same.

    Args:
        parent, timeout_secs, members, store: as of Rendezvous.
    """

    def __init__(
        self,
        parent: dist.ProcessGroup,
        timeout_secs: float,
        members: Sequence[int],
        store: distributed_c10d.Store | None,
    ) -> None:
        super().__init__(parent, timeout_secs, members, store)
        self._poll_secs = min(POLL_SECS_PER_MEMBER * self.world_size, LONGEST_POLL_SECS)
        places = range(self.world_size)
        self._tickets, self._read = [f"ticket/{place}" for place in places], [f"read/{place}" for place in places]
        self._known: set[str] = set()
        self._came: set[int] = set()

    def meet(self, label: str) -> str:
        """Waits until all members are there, and returns a name that only this meeting has.

        Raises:
            RankTimeoutError: members did not come; the error names them. Or the store has ended.
            ConfigMismatchError: members have another wire format. The ticket must stay, so that all find out.
        """
        self.process.require("the group of ranks")
        deadline = time.monotonic() + self.timeout_secs
        own = json.dumps(with_version({"ticket": secrets.token_hex(8)}))
        said = ""
        with self._store_must_answer(label):
            # in this order: whoever finds a ticket finds what its member has read, too
            self._store.set(self._read[self.rank], said)
            self._store.set(self._tickets[self.rank], own)
            while True:
                tickets = self._all_tickets()
                if tickets is not None:
                    require_one_version([_parsed(ticket) for ticket in tickets], self.members)
                    name = hashlib.sha256(b"|".join(tickets)).hexdigest()[:16]
                    if name != said:
                        self._store.set(self._read[self.rank], name)
                        said = name
                    if set(self._what_all_have_read()) == {said}:
                        return name
                if time.monotonic() > deadline:
                    if blamed := self._to_blame(said):
                        raise self._did_not_come(blamed, label)
                    # the last one has read it this moment
                    return said
                time.sleep(self._poll_secs)

    def tell(self, name: str, *, succeeded: bool, deadline: float) -> tuple[bool, tuple[int, ...]]:
        """Says how this member went on from the meeting of this name, and hears the others, until a time.monotonic().

        Returns:
            Whether all have succeeded, and the members that have not said anything.

        Raises:
            RankTimeoutError: the store has ended.
        """
        keys = [f"{name}/{place}" for place in range(self.world_size)]
        with self._store_must_answer("how members go on"):
            self._store.set(keys[self.rank], SUCCEEDED if succeeded else "failed")
            if absent := self._await(keys, deadline):
                return False, absent
            return {bytes(each) for each in self._store.multi_get(keys)} == {SUCCEEDED.encode()}, ()

    def end(self) -> None:
        """Takes this member's ticket away; nothing happens where the store has ended."""
        try:
            self._store.set(self._tickets[self.rank], ABSENT.decode())
        except RuntimeError:
            return

    def _all_tickets(self) -> list[bytes] | None:
        """The members' tickets; None where some are not there."""
        self._known.update(key for key in self._tickets if key not in self._known and self._store.check([key]))
        places = [place for place, key in enumerate(self._tickets) if key in self._known]
        found = [bytes(each) for each in self._store.multi_get([self._tickets[place] for place in places])]
        self._came.update(place for place, ticket in zip(places, found, strict=True) if ticket != ABSENT)
        return found if len(found) == self.world_size and ABSENT not in found else None

    def _to_blame(self, said: str) -> tuple[int, ...]:
        """Members that have never been there; else those that have not read what this one has; else those that left.

        Whoever gave up a moment ago has read the same. () where all have.
        """
        places = [place for place in range(self.world_size) if place not in self._came]
        if not places and said:
            places = [place for place, read in enumerate(self._what_all_have_read()) if read != said]
        elif not places:
            tickets = self._store.multi_get(self._tickets)
            left = [place for place, ticket in enumerate(tickets) if bytes(ticket) == ABSENT]
            places = left or [place for place in range(self.world_size) if place != self.rank]
        return tuple(self.members[place] for place in places)

    def _what_all_have_read(self) -> list[str]:
        return [bytes(each).decode(errors="replace") for each in self._store.multi_get(self._read)]


def _parsed(ticket: bytes) -> Any:
    """Reads a ticket; anybody who reaches the store can write there."""
    try:
        return json.loads(ticket)
    except (ValueError, RecursionError):
        return None
