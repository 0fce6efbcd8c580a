"""What ranks of other hosts say about their host: who lives there, who has given up, and the verdicts they know.

Every rank sends short datagrams to the ranks of other hosts: to each in turn once in 0.8 s; with news to all at once,
and five times a second from the first failure on. No store and no single process has to live for that: whoever lives
on a host speaks for all its ranks. A host of which nobody has been heard for the bound of a wait is gone, as far as one
can see from here.

Datagrams carry a token that the group's store gave to its members, and are read as JSON with checked values. They are
not encrypted, as no transport between hosts is (SECURITY.md).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import select
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ep_a2a.memory.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

SPEAK_SECS = 0.2
SHORTEST_WAIT_SECS = 0.001
NUM_TURNS = 4
"""Turns of SPEAK_SECS in which a rank without news has spoken to each other rank once."""
SILENCE_SECS = 1.0
"""A host that says nothing for longer is watched: it may be loaded, or gone. This is longer than all turns take. It is
shorter than survivors wait before they judge (ops/agreement.py): they see a lost connection long before a wait ends."""
HELLO_SECS = 1.0
"""How long ranks wait at construction until they have heard each other."""
MAX_DATAGRAM_BYTES = 65507
TOKEN_BYTES = 16
DISCARD_PORT = 9
LOCALHOST = "127.0.0.1"


class Seen(NamedTuple):
    """A rank as its host sees it: the value of a Presence, and for how long its process has not beaten."""

    presence: int
    still_secs: float


class Said(NamedTuple):
    """The statement of a rank that gives up a call, as another host hears it; see liveness.GivenUp."""

    failure: int
    rank: int
    lacked: tuple[int, ...]
    began: bool


class Report(NamedTuple):
    """The state of a host, as one of its ranks knows it.

    Attributes:
        seen: the ranks of the host.
        said: by ranks of the host that gave up.
        verdicts: fates of all ranks, by number of the failure.
        leaves: whether the speaker closes its arena, and speaks no more.
    """

    seen: dict[int, Seen]
    said: tuple[Said, ...]
    verdicts: dict[int, tuple[int, ...]]
    leaves: bool = False

    def without(self, failure: int) -> Report:
        """This report but for what it says of a failure."""
        said = tuple(each for each in self.said if each.failure != failure)
        return self._replace(said=said, verdicts={n: fates for n, fates in self.verdicts.items() if n != failure})

    def to_json(self) -> list[Any]:
        """This report in values that JSON can hold."""
        seen = [[rank, *each] for rank, each in self.seen.items()]
        return [seen, self.said, list(self.verdicts.items()), self.leaves]

    @classmethod
    def from_json(cls, value: Any, world_size: int) -> Report:
        """Reads a report; ValueError, TypeError or KeyError where it is none."""
        seen, said, verdicts, leaves = value
        report = cls(
            {int(rank): Seen(int(presence), float(secs)) for rank, presence, secs in seen},
            tuple(Said(int(f), int(rank), tuple(map(int, lacked)), bool(began)) for f, rank, lacked, began in said),
            {int(failure): tuple(map(int, fates)) for failure, fates in verdicts},
            bool(leaves),
        )
        ranks = {*report.seen, *(rank for each in report.said for rank in (each.rank, *each.lacked))}
        if not ranks <= set(range(world_size)) or any(len(fates) != world_size for fates in report.verdicts.values()):
            raise ValueError("a report of another group")
        return report


class OtherHosts:
    """Speaks with the ranks of other hosts. Made by `meet`.

    Args:
        own: this rank's socket, which is then this object's.
        peers: addresses of the ranks of other hosts.
        token: stands in each datagram of this group.
        hosts: the host of each rank, by any name that is equal on all ranks.
        rank: this one.
        own_report: what to say; held weakly.
    """

    def __init__(
        self,
        own: socket.socket,
        peers: dict[int, tuple[str, int]],
        token: str,
        hosts: Sequence[str],
        rank: int,
        own_report: weakref.WeakMethod[Callable[[], Report]],
    ) -> None:
        self.hosts, self.rank, self._pid = tuple(hosts), rank, os.getpid()
        self._heard: dict[int, tuple[float, Report]] = {}
        # since when nothing has waited to be read: silence counts up to there
        self._listened = [time.monotonic()]
        self._mouth = _Mouth(own, peers, token, rank, own_report)
        stopping = threading.Event()
        arguments = self._mouth, self._heard, self._listened, len(hosts), stopping
        threading.Thread(target=_listen, args=arguments, name="ep_a2a other hosts", daemon=True).start()
        self._finalizer = weakref.finalize(self, stopping.set)

    @classmethod
    def meet(
        cls, rendezvous: Rendezvous, hosts: Sequence[str], own_report: Callable[[], Report] | None
    ) -> OtherHosts | None:
        """Connects ranks of different hosts. Collective. None where there is one host, or no network."""
        if len(set(hosts)) == 1:
            return None
        own: socket.socket | None = None
        port = 0
        address = _own_address(rendezvous.store_host)
        with contextlib.suppress(OSError):
            own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            # the store's host knows its own address on the way to the others by no name
            own.bind(("" if _is_loopback(address) else address, 0))
            port = own.getsockname()[1]
        offer = {"address": address, "port": port, "token": secrets.token_hex(TOKEN_BYTES)}
        offers = rendezvous.exchange("sockets of ranks", offer)
        if own is None or own_report is None:
            return None
        rank = rendezvous.rank
        # whoever names itself by a loopback address is on the store's host
        store_address = _resolved(rendezvous.store_host)
        peers = {
            other: (store_address if _is_loopback(each["address"]) else each["address"], each["port"])
            for other, each in enumerate(offers)
            if hosts[other] != hosts[rank] and each["port"]
        }
        found = cls(own, peers, offers[0]["token"], hosts, rank, weakref.WeakMethod(own_report))
        found.await_hello(peers)
        return found

    def await_hello(self, peers: Iterable[int]) -> None:
        """Returns when all peers have been heard, after HELLO_SECS at the latest."""
        deadline = time.monotonic() + HELLO_SECS
        while set(peers) - set(self._heard) and time.monotonic() < deadline:
            self._mouth.speak()
            time.sleep(0.01)
        # those who have heard everybody may not have been heard by all
        self._mouth.speak()
        if unheard := sorted(set(peers) - set(self._heard)):
            logger.warning(
                "rank %d hears nothing from ranks %s by UDP, so it cannot tell whether they live; let UDP through "
                "between the hosts",
                self.rank,
                unheard,
            )

    def speak(self) -> None:
        """Tells the others what is new."""
        self._mouth.speak()

    def seen(self, rank: int) -> tuple[Seen, float] | None:
        """A rank as its host sees it, and for how many seconds that host has been silent; None: never heard."""
        reports = [
            (at, report) for other, (at, report) in list(self._heard.items()) if self.hosts[other] == self.hosts[rank]
        ]
        told = [(at, report) for at, report in reports if rank in report.seen]
        if not told:
            return None
        _, report = max(told, key=lambda each: each[0])
        # a process that has not run for a while has not heard, which is no silence
        silent_secs = 0.0 if report.leaves else self._listened[0] - max(at for at, _ in reports)
        return report.seen[rank], max(0.0, silent_secs)

    def said(self, failure: int) -> list[Said]:
        """What ranks of other hosts have said about a failure."""
        return [said for _, report in list(self._heard.values()) for said in report.said if said.failure == failure]

    def verdict(self, failure: int) -> tuple[int, ...] | None:
        """The verdict that the lowest rank knows; None when none is known."""
        known = {
            other: report.verdicts[failure]
            for other, (_, report) in list(self._heard.items())
            if failure in report.verdicts
        }
        return known[min(known)] if known else None

    def close(self) -> None:
        """Says goodbye. Idempotent; a forked child says nothing."""
        if self._finalizer.alive and self._pid == os.getpid():
            self._mouth.speak(leaves=True)
            self._finalizer()


class _Mouth:
    """Sends this rank's report, where the others are."""

    def __init__(
        self,
        own: socket.socket,
        peers: dict[int, tuple[str, int]],
        token: str,
        rank: int,
        own_report: weakref.WeakMethod[Callable[[], Report]],
    ) -> None:
        self.socket, self.peers, self.token, self._rank, self._own_report = own, peers, token, rank, own_report
        self._turn = 0
        self._leaves = False
        # garbage collection may close an arena, and say its goodbye, in the middle of a report
        self._one_at_a_time = threading.RLock()

    def speak(self, *, leaves: bool = False) -> bool:
        """Tells all peers; whether there still is somebody who reports. Whoever leaves says so ever after."""
        return self._send(self.peers, leaves=leaves)

    def speak_in_turn(self) -> bool:
        """Tells the peers whose turn it is; whether there still is somebody who reports."""
        self._turn += 1
        # ranks of one host take different turns, so that a peer hears from each host all the time
        return self._send(list(self.peers)[(self._turn + self._rank) % NUM_TURNS :: NUM_TURNS])

    def _send(self, peers: Iterable[int], *, leaves: bool = False) -> bool:
        report = self._own_report()
        if report is None:
            return False
        # the listener speaks beside the thread that says goodbye: no other report may come behind that
        with self._one_at_a_time:
            self._leaves = says_goodbye = self._leaves or leaves
            text = self._datagram(report()._replace(leaves=says_goodbye))
            for address in [self.peers[peer] for peer in peers]:
                if self._leaves and not says_goodbye:
                    break
                with contextlib.suppress(OSError):
                    self.socket.sendto(text, address)
        return True

    def _datagram(self, report: Report) -> bytes:
        """A report as bytes. Failures are left out until it fits: those judged first, and of them the oldest."""
        while True:
            text = json.dumps([self.token, self._rank, report.to_json()]).encode()
            failures = {said.failure for said in report.said}.union(report.verdicts)
            if len(text) <= MAX_DATAGRAM_BYTES or not failures:
                return text
            # a verdict has been told before; a failure without one is still being judged
            report = report.without(min(failures, key=lambda number: (number not in report.verdicts, number)))


def _listen(
    mouth: _Mouth,
    heard: dict[int, tuple[float, Report]],
    listened: list[float],
    world_size: int,
    stopping: threading.Event,
) -> None:
    """Hears the others, and speaks every SPEAK_SECS."""
    next_time = 0.0
    # select refuses descriptors from 1024 on
    poll = select.poll()
    poll.register(mouth.socket, select.POLLIN)
    while not stopping.is_set():
        if time.monotonic() >= next_time:
            next_time = time.monotonic() + SPEAK_SECS
            fails = any(report.said for _, report in heard.values())
            if not (mouth.speak() if fails else mouth.speak_in_turn()):
                break
        # anybody may send anything; a port where nobody listens any more is an OSError, and so is silence
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError, OverflowError):
            if not poll.poll(0):
                listened[0] = time.monotonic()
            mouth.socket.settimeout(max(SHORTEST_WAIT_SECS, next_time - time.monotonic()))
            text, address = mouth.socket.recvfrom(MAX_DATAGRAM_BYTES)
            token, rank, report = json.loads(text)
            if hmac.compare_digest(token, mouth.token) and rank in mouth.peers:
                heard[rank] = time.monotonic(), Report.from_json(report, world_size)
                mouth.peers[rank] = address
    mouth.socket.close()


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _resolved(host: str) -> str:
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host)
    return LOCALHOST


def _own_address(store_host: str) -> str:
    """The address from which this host reaches the store's."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store_host, DISCARD_PORT))
        return str(probe.getsockname()[0])
    return LOCALHOST
