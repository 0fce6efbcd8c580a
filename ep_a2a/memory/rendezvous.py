"""Rendezvous: ranks exchange small JSON messages through the process group's store, within a bound of time."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.errors import ConfigMismatchError, RankTimeoutError
from ep_a2a.memory.use_order import OwnProcess
from ep_a2a.topology.facts import require_one_version, with_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEFAULT_TIMEOUT_SECS = 300.0
NO_ANSWER = "the store of the process group does not answer"
STORE_PATIENCE_SECS = 1.0
"""Bound for the answer of a working store."""
LEAVERS_POLL_SECS = 0.005
SHOWN_CHARACTERS = 40
EXIT_SECS = 0.1
"""A process that ends closes its connections a little before its other files."""
LOCALHOST = "127.0.0.1"


def is_like(message: Any, own: Any) -> bool:
    """Whether a message can stand where this rank sends `own`: of the same kind, an object with the same fields."""
    if isinstance(own, dict):
        same_fields = isinstance(message, dict) and set(message) == set(own)
        return same_fields and all(_kind_fits(message[name], own[name]) for name in own)
    return _kind_fits(message, own)


def _kind_fits(value: Any, own: Any) -> bool:
    kind = int | float if isinstance(own, int | float) else str | int | float | list if own is None else type(own)
    # a rank that has nothing to say says None, beside others that have
    return value is None or isinstance(value, kind)


class Rendezvous:
    """Exchanges messages among ranks of a group, in the same order on every rank.

    Args:
        group: the process group; any backend, since only its store is used.
        timeout_secs: how long to wait for the slowest rank of one exchange.
        members: the ranks of `group` that meet, equal on all of them; None is all. `rank` and `world_size` are then
            this rank's place among them and their number; errors name ranks of `group`.
        store: where they meet; None is the group's own.

    Attributes:
        store_host: the name or address of the store's host.
        tell_apart: which of some ranks are gone, and which live; see Liveness.tell_apart. None where nobody can say.

    Raises:
        RankTimeoutError: the store has ended.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_secs: float = DEFAULT_TIMEOUT_SECS,
        members: Sequence[int] | None = None,
        store: distributed_c10d.Store | None = None,
    ) -> None:
        self.process = OwnProcess()
        self.group = group
        self.members = tuple(range(dist.get_world_size(group)) if members is None else members)
        self.rank = self.members.index(dist.get_rank(group))
        self.world_size = len(self.members)
        self.timeout_secs = timeout_secs
        prefix = "ep_a2a" if members is None else f"ep_a2a/of/{','.join(map(str, self.members))}"
        store = distributed_c10d._get_process_group_store(group) if store is None else store
        self._store = distributed_c10d.PrefixStore(prefix, store)
        self.store_host = _host_of(store)
        self.tell_apart: Callable[[Sequence[int], float], tuple[tuple[int, ...], tuple[int, ...]]] | None = None
        with self._store_must_answer("the first word of a meeting"):
            self._generation = int(self._store.add(f"generation/{self.rank}", 1))
        self._sequence = self._generation << 32

    def exchange(self, label: str, message: Any) -> list[Any]:
        """Returns every rank's message, in the order of `members`.

        Args:
            label: subject of this meeting; must be equal on all ranks.
            message: anything JSON can hold.

        Raises:
            RankTimeoutError: ranks did not come; the error names them.
            ConfigMismatchError: ranks came to meet about different things, or with another wire format.
            ForkedProcessError: this is a forked child of the process that made this object.
        """
        self.process.require("the group of ranks")
        self._sequence += 1
        answer = with_version({"label": label, "message": message})
        with self._store_must_answer(label):
            self._store.set(self._key(self._sequence, self.rank), json.dumps(answer))
            answers = [self._parsed(text, place, label) for place, text in enumerate(self._texts(label))]
            # a rank that takes part in exchange n has read all of exchange n - 2
            self._store.delete_key(self._key(self._sequence - 2, self.rank))
        require_one_version(answers, self.members)
        for place, each in enumerate(answers):
            if not isinstance(each.get("label"), str) or "message" not in each:
                raise self._unreadable(place, label, "an object without label and message")
        labels = [answer["label"] for answer in answers]
        if len(set(labels)) > 1:
            other = next(rank for rank, text in enumerate(labels) if text != label)
            raise ConfigMismatchError(
                f"all ranks to reach the same step; rank {self.members[self.rank]} is at {label!r}",
                f"rank {self.members[other]} at {labels[other]!r}",
                "Make the same calls in the same order on every rank.",
            )
        for place, each in enumerate(answers):
            if not is_like(each["message"], message):
                raise self._unreadable(
                    place, label, f"a message that begins {str(each['message'])[:SHOWN_CHARACTERS]!r}"
                )
        return [answer["message"] for answer in answers]

    def _parsed(self, text: bytes, place: int, label: str) -> Any:
        """Reads a member's text as JSON; anybody who reaches the store can write there."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise self._unreadable(place, label, f"{len(text)} bytes that are no JSON") from None

    def _unreadable(self, place: int, label: str, got: str) -> ConfigMismatchError:
        return ConfigMismatchError(
            f"a message of this package from rank {self.members[place]} at {label!r}",
            got,
            "Look who else writes to the store of the process group.",
        )

    def barrier(self, label: str) -> None:
        """Returns when every rank has come."""
        self.exchange(label, None)

    def agree(self, label: str, error: Exception | None) -> None:
        """Raises on every rank when any rank has an error: its own on the failing rank, that rank's text elsewhere."""
        texts = self.exchange(label, None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [rank for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise ConfigMismatchError(
                f"{label} to succeed on every rank",
                f"rank {self.members[failed[0]]} failed with {texts[failed[0]]}",
                "See above.",
            )

    def leave(self, patience_secs: float) -> str | None:
        """Holds the last meeting: waits until the others leave, too, for patience_secs at most.

        Returns:
            None when all members have come; else the reason why some may not have. Raises nothing.
        """
        answers: list[str | None] = []

        def meet() -> None:
            try:
                answers.append(self._wait_for_leavers(time.monotonic() + patience_secs))
            except RuntimeError as error:
                answers.append(f"{NO_ANSWER}: {str(error).partition(chr(10))[0]}")

        # A store behind a cut link never answers and ignores its bound. A separate thread can be left behind.
        asking = threading.Thread(target=meet, name="ep_a2a leaves", daemon=True)
        try:
            asking.start()
        except RuntimeError as error:
            return f"no thread could be started: {error}"
        asking.join(patience_secs + STORE_PATIENCE_SECS)
        return answers[0] if answers else NO_ANSWER

    def _wait_for_leavers(self, deadline: float) -> str | None:
        absent = self._call("left", deadline)
        return f"no sign of ranks {', '.join(map(str, absent))}" if absent else None

    def call(self, label: str, deadline: float) -> tuple[int, ...]:
        """Says once that this rank is here, and returns the members that do not say so before a time.monotonic().

        Raises:
            RankTimeoutError: the store has ended.
        """
        with self._store_must_answer(label):
            return self._call(label, deadline)

    def _call(self, label: str, deadline: float) -> tuple[int, ...]:
        keys = [f"{label}/{self._generation}/{place}" for place in range(self.world_size)]
        self._store.set(keys[self.rank], "")
        return self._await(keys, deadline)

    def _await(self, keys: list[str], deadline: float) -> tuple[int, ...]:
        """Waits for the members' keys, and returns the members whose keys are missing at a time.monotonic()."""
        # the store's own wait may take twice its bound
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return self._absent(keys)
            time.sleep(LEAVERS_POLL_SECS)
        return ()

    def _absent(self, keys: list[str]) -> tuple[int, ...]:
        """Returns the members whose keys are missing."""
        return tuple(member for member, key in zip(self.members, keys) if not self._store.check([key]))

    def _key(self, sequence: int, rank: int) -> str:
        return f"{sequence}/{rank}"

    def _texts(self, label: str) -> list[bytes]:
        """Returns every member's message of this exchange."""
        deadline = time.monotonic() + self.timeout_secs
        keys = [self._key(self._sequence, place) for place in range(self.world_size)]
        for key in keys:
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except dist.DistNetworkError:
                raise
            except RuntimeError as error:
                raise self._did_not_come(self._absent(keys), label) from error
        return [bytes(self._store.get(key)) for key in keys]

    def _did_not_come(self, absent: tuple[int, ...], label: str) -> RankTimeoutError:
        """Returns the error for members that did not come."""
        missing, late = self.missing_and_late(absent)
        return RankTimeoutError(
            f"all {self.world_size} ranks at {label!r} within {self.timeout_secs:g} s",
            f"no sign of rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
            + (f"; the processes of ranks {list(late)} run" if late else ""),
            "Check that these ranks are alive and make the same calls in the same order.",
            missing_ranks=missing,
            late_ranks=late,
        )

    def missing_and_late(self, absent: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Parts ranks that did not come: into those that may be gone, and those whose processes run."""
        _, late = ((), ()) if self.tell_apart is None else self.tell_apart(absent, self.timeout_secs)
        return tuple(rank for rank in absent if rank not in late), late

    @contextlib.contextmanager
    def _store_must_answer(self, label: str) -> Iterator[None]:
        """Turns the failure of the store's process into a RankTimeoutError that says so."""
        try:
            yield
        except dist.DistNetworkError as error:
            gone: tuple[int, ...] = ()
            if self.tell_apart is not None:
                time.sleep(EXIT_SECS)
                gone, _ = self.tell_apart(self.members, self.timeout_secs)
            raise RankTimeoutError(
                f"the store of the process group to answer at {label!r}",
                str(error).partition("\n")[0],
                "The process that holds the store has ended, as a rule that of rank 0. Those who are left can meet in "
                "another store: ep_a2a.survivors(..., store=) or memory.subgroups.make_subgroup(..., store=).",
                missing_ranks=gone,
            ) from error


def _host_of(store: distributed_c10d.Store) -> str:
    """The name or address of the host of a TCP store; this host's for others."""
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", LOCALHOST))
