"""Rendezvous: ranks exchange small JSON messages through the process group's store, within a bound of time."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a import clock
from ep_a2a.config.op_config import WIRE_FORMAT_VERSION
from ep_a2a.errors import ConfigMismatchError, EpA2AError, HostMemoryError, RankTimeoutError
from ep_a2a.memory.guards import OwnProcess
from ep_a2a.memory.host_record import parsed
from ep_a2a.memory.peers import Peers, begun, peers_of
from ep_a2a.memory.verdict import GivenUp, Verdict, judge_meeting

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_telling: ContextVar[tuple[Rendezvous, ...]] = ContextVar("telling", default=())
"""Those whose `telling` this thread is in. Meetings of some ranks may be held meanwhile."""

DEFAULT_TIMEOUT_SECS = 300.0
FIRST_WORD = "the first word of a meeting"
STORE_PATIENCE_SECS = 1.0
"""Bound for the answer of a working store."""
POLL_SECS_PER_RANK = 0.001
LONGEST_POLL_SECS = 0.05
SAY_SECS = 1.0
"""How often a rank that waits in a meeting tells the ranks of its host so."""
SHOWN_CHARACTERS = 40
DECISION = "decision"
VERSION_KEY = "wire_format_version"
FAILED_KEY = "failed"
"""In a rank's message, in place of label and message: the error that kept it from coming to the meeting."""
UNKNOWN = "an older one, which does not say"


def is_like(message: Any, own: Any) -> bool:
    """Whether a peer's message has the fields and types of our own. None fits everywhere."""
    if isinstance(own, dict):
        same_fields = isinstance(message, dict) and set(message) == set(own)
        return same_fields and all(_kind_fits(message[name], own[name]) for name in own)
    return _kind_fits(message, own)


def _kind_fits(value: Any, own: Any) -> bool:
    kind = int | float if isinstance(own, int | float) else str | int | float | list if own is None else type(own)
    # a rank that has nothing to say says None, beside others that have
    return value is None or isinstance(value, kind)


class Rendezvous:
    """Exchanges messages among the ranks of a group, in the same order on every rank.

    The first rank to end an exchange decides whether all have come, and the others follow: it succeeds on all or fails
    on all.

    Args:
        group: the process group; any backend, since only its store is used.
        timeout_secs: how long to wait for the slowest rank of one exchange.
        ranks: the ranks of the group that meet, this one among them, equal on all of them; None for all. To meet again
            after one has given up, each makes a new Rendezvous.
        store: where they meet; None for the group's store.

    Attributes:
        rank: this rank in the group. world_size: the number of ranks that meet.
        peers: the ranks, as this process sees them. The death of one that meets ends every exchange.

    Raises:
        RankTimeoutError: the store has ended.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_secs: float = DEFAULT_TIMEOUT_SECS,
        *,
        ranks: Sequence[int] | None = None,
        store: distributed_c10d.Store | None = None,
    ) -> None:
        self.process = OwnProcess()
        self.group = group
        self.timeout_secs = timeout_secs
        with store_must_answer(FIRST_WORD, None):
            self.peers = peers_of(group)
        self.rank = self.peers.rank
        self.ranks = tuple(range(self.peers.world_size)) if ranks is None else tuple(ranks)
        self.world_size = len(self.ranks)
        self._place = self.ranks.index(self.rank)
        self._has_all = ranks is None
        name = "ep_a2a" if ranks is None else f"ep_a2a/of/{','.join(map(str, ranks))}"
        self._store = distributed_c10d.PrefixStore(name, self.peers.group_store if store is None else store)
        with store_must_answer(FIRST_WORD, self.peers):
            self._sequence = self._new_generation() << 32
        self._all_know = False

    def _new_generation(self) -> int:
        """Number that keeps this meeting's keys apart from earlier ones; equal on all ranks.

        All ranks of a group make theirs in the same order, so each rank counts. Some ranks of a group may meet again
        after a failure, and take the first number whose first exchange has no decision.
        """
        if self._has_all:
            return int(self._store.add(f"generation/{self.rank}", 1))
        return next(n for n in itertools.count() if not self._store.check([self._key((n << 32) + 1, DECISION)]))

    @property
    def last_meeting(self) -> str:
        """Key of the last exchange, equal on all ranks."""
        return str(self._sequence)

    def exchange(self, label: str, message: Any) -> list[Any]:
        """Returns every rank's message, in the order of `ranks`.

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
        self._all_know = False
        own = json.dumps(with_version({"label": label, "message": message}))
        with store_must_answer(label, self.peers):
            try:
                answers = [parsed(text) for text in self._texts(label, own)]
            finally:
                # all ranks of this host that came have opened the file
                if self._has_all:
                    self.peers.host_record.unlink()
        self._require_one_version(answers)
        self._raise_what_is_told(answers, label)
        return [self._message_of(*each, label, message) for each in zip(self.ranks, answers, strict=True)]

    def _message_of(self, rank: int, answer: Any, label: str, own: Any) -> Any:
        """Returns the message in a rank's answer."""
        sender = f"rank {rank}"
        if not isinstance(answer.get("label"), str) or "message" not in answer:
            raise unreadable(sender, label, "an object without label and message")
        if answer["label"] != label:
            raise ConfigMismatchError(
                f"all ranks to reach the same step; rank {self.rank} is at {label!r}",
                f"{sender} at {answer['label']!r}",
                "Make the same calls in the same order on every rank.",
            )
        message = answer["message"]
        if not is_like(message, own):
            raise unreadable(sender, label, f"a message that begins {str(message)[:SHOWN_CHARACTERS]!r}")
        return message

    def barrier(self, label: str) -> None:
        """Returns when every rank has come."""
        self.exchange(label, None)

    @contextlib.contextmanager
    def telling(self, waiting_at: str | None = None) -> Iterator[None]:
        """Context of this rank's part of a collective call: an exception in it ends the call on all ranks.

        The other ranks raise ConfigMismatchError, with this rank's number and the error's text, from the next exchange.
        Contexts may be nested.

        Args:
            waiting_at: None: this rank does not wait for the others. A label: it waits for them to come to their next
                exchange, since they use until then what this rank takes away when the context has ended.
        """
        self._all_know = False
        token = _telling.set((*_telling.get(), self))
        try:
            yield
        except Exception as error:
            told = self.tell(error)
            if told is not None and waiting_at is not None:
                try:
                    self._texts(waiting_at, told)
                except RankTimeoutError as absent:
                    # of a meeting of some ranks, which counts them in its own way
                    if isinstance(error, RankTimeoutError):
                        raise absent from error
                except (EpA2AError, RuntimeError) as other:
                    # this rank raises its own, below
                    logger.debug("the meeting ended by another rank's error, too: %s", other)
            raise
        finally:
            _telling.reset(token)

    def tell(self, error: Exception) -> str | None:
        """Makes `error` this rank's part of the next exchange, and returns that. Waits for nobody.

        None where all ranks know of a failure, or in a forked child, which is no rank. A store that has ended tells
        nobody.
        """
        if self._all_know or not self.process.is_current:
            return None
        self._all_know = True
        self._sequence += 1
        told = json.dumps(with_version({FAILED_KEY: f"{type(error).__name__}: {error}"}))
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key(self._sequence, self._place), told)
        return told

    def _require_one_version(self, answers: Sequence[Any]) -> None:
        """Refuses ranks of different wire formats, before anything else of an answer is read."""
        ranks_of: dict[str, list[int]] = {}
        for rank, answer in zip(self.ranks, answers, strict=True):
            version = str(answer.get(VERSION_KEY, UNKNOWN)) if isinstance(answer, dict) else UNKNOWN
            ranks_of.setdefault(version, []).append(rank)
        if len(ranks_of) > 1:
            found = "; ".join(f"{version} on ranks {of}" for version, of in ranks_of.items())
            raise ConfigMismatchError(
                "one wire format version on all ranks", found, "Install the same version of ep-a2a on all hosts."
            )

    def _raise_what_is_told(self, answers: Sequence[Any], label: str) -> None:
        """Raises ConfigMismatchError where a rank has told an error in place of coming."""
        for rank, answer in zip(self.ranks, answers, strict=True):
            if FAILED_KEY in answer:
                self._all_know = True
                raise ConfigMismatchError(
                    f"{label} to succeed on every rank",
                    f"rank {rank} failed with {answer[FAILED_KEY]}",
                    f"Correct the cause on rank {rank}, then make the call on every rank again.",
                )

    def attempt(self, label: str, work: Callable[[], Result]) -> Result:
        """Does `work` on every rank and returns its result; where it fails on one rank, all raise as `telling` says."""
        with self.telling(label):
            result = work()
        self.barrier(label)
        return result

    def leave(self, patience_secs: float) -> str | None:
        """Holds the last meeting: waits until the others leave, too, for patience_secs at most. Masked ranks do not.

        Returns:
            None when all ranks have come; else the reason why some may not have. Raises nothing.
        """
        self.timeout_secs = patience_secs

        def meet() -> None:
            # who is masked itself is not awaited, but waits
            living = tuple(rank for rank in self.ranks if rank not in self.peers.masked - {self.rank})
            lost = living != self.ranks
            (Rendezvous(self.group, patience_secs, ranks=living) if lost else self).barrier("the last meeting")

        try:
            begun(meet).result(patience_secs + STORE_PATIENCE_SECS)
        except EpA2AError as error:
            return error.got
        except (RuntimeError, TimeoutError):
            return "the store of the process group does not answer"
        return None

    def _key(self, sequence: int, part: int | str) -> str:
        """Key of the text of the rank at a place, or of DECISION."""
        return f"{sequence}/{part}"

    def _texts(self, label: str, own: str) -> list[bytes]:
        """Sends `own`, and returns the text of every rank, once one of them has decided that all have come."""
        store, sequence = self._store, self._sequence
        keys = [self._key(sequence, place) for place in range(self.world_size)]
        decision = self._key(sequence, DECISION)
        store.set(keys[self._place], own)
        judged = self._judged(keys, decision, label)
        try:
            verdict = Verdict.from_json(parsed(store.compare_set(decision, "", json.dumps(judged))))
        except (ValueError, TypeError):
            raise unreadable("the first rank to decide", label, "no decision") from None
        if verdict != Verdict():
            self._all_know = True
            absent = sorted((*verdict.missing, *verdict.late))
            if (call := self._ended_call(absent)) is not None:
                call.barrier(label)
            raise verdict.error(
                self.rank,
                f"all ranks at {label!r} within {self.timeout_secs:g} s",
                f"no sign of rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}",
                "Check that these ranks are alive and make the same calls in the same order.",
            )
        self.peers.withdraw()
        texts = [bytes(store.get(key)) for key in keys]
        # a rank that takes part in exchange n has left exchange n - 2
        store.delete_key(self._key(sequence - 2, self._place))
        if self._place == 0:
            store.delete_key(self._key(sequence - 2, DECISION))
        return texts

    def _ended_call(self, absent: Iterable[int]) -> Rendezvous | None:
        """Where all ranks meet of whom some meet here, if an absent one has told an error there; else None."""
        for call in _telling.get():
            if call is not self and call.peers is self.peers and any(call._has_told(rank, ahead=1) for rank in absent):  # noqa: SLF001
                return call
        return None

    @property
    def is_broken(self) -> bool:
        """Whether a rank has ended, or has told an error in place of coming to the next meeting."""
        gone = self.peers.look()
        return any(rank in gone or self._has_told(rank, ahead=1) for rank in self.ranks)

    def _has_told(self, rank: int, ahead: int = 0) -> bool:
        """Whether a rank has told an error in place of coming to the present meeting, or to one that is ahead."""
        key = self._key(self._sequence + ahead, self.ranks.index(rank))
        found = parsed(self._store.get(key)) if self._store.check([key]) else None
        return isinstance(found, dict) and FAILED_KEY in found

    def _judged(self, keys: list[str], decision: str, label: str) -> Verdict:
        """Waits for the keys of all ranks, and returns the verdict on those that have not come or are gone."""
        poll_secs = min(POLL_SECS_PER_RANK * len(keys), LONGEST_POLL_SECS)
        start = clock.now()
        say_at = start + SAY_SECS
        while True:
            # before the keys: a rank that is gone may have come before, and would not come to the next exchange
            gone = {rank for rank in self.peers.look() if rank in self.ranks and not self._has_told(rank)}
            is_over = clock.now() > start + self.timeout_secs or self._store.check([decision])
            late = () if self._store.check(keys) else zip(self.ranks, keys, strict=True)
            absent = {rank for rank, key in late if not self._store.check([key])}
            if not absent and not gone:
                return Verdict()
            is_over = is_over or self._ended_call(absent) is not None or any(map(self.peers.has_gone, absent))
            awaited, name = tuple(sorted(absent | gone)), f"the meeting {label!r}"
            wait = GivenUp("meeting", name, awaited, waited=True, at=clock.now(), is_meeting=True)
            if gone or is_over:
                return judge_meeting(self.rank, wait, self.peers.see(), start)
            if clock.now() >= say_at:
                self.peers.give_up(wait)
                say_at = clock.now() + SAY_SECS
            clock.sleep(poll_secs)


@contextlib.contextmanager
def telling_before_the_first_meeting(group: dist.ProcessGroup | None) -> Iterator[None]:
    """`Rendezvous.telling` where the Rendezvous of `group` that the ranks make next does not exist yet."""
    try:
        yield
    except Exception as error:
        # as the other ranks make theirs; the error may be that there is no such group
        with contextlib.suppress(Exception):
            Rendezvous(cast("dist.ProcessGroup", group)).tell(error)
        raise


def unreadable(sender: str, label: str, got: str) -> ConfigMismatchError:
    """Returns the error of a message that no rank of this package has sent.

    Args:
        sender: who should have sent it. label: the meeting's. got: what came.
    """
    return ConfigMismatchError(
        f"a message of this package from {sender} at {label!r}",
        got,
        "Look who else writes to the store of the process group.",
    )


def no_room(error: BaseException) -> HostMemoryError | None:
    """Returns our error where the file that is a process group's store could not grow; None for another error."""
    if not isinstance(error, dist.DistStoreError) or os.strerror(errno.ENOSPC) not in str(error):
        return None
    return HostMemoryError(
        "room in the file that is the store of the process group",
        str(error).partition("\n")[0],
        "Free space in its file system. A RankPool's, as of demos and tests, is /dev/shm: remove old files, or enlarge "
        "it (for containers: --shm-size).",
    )


@contextlib.contextmanager
def store_must_answer(label: str, peers: Peers | None) -> Iterator[None]:
    """Turns the failure of the store's process, or of the file that holds it, into an error that says so.

    Raises:
        RankTimeoutError: the store does not answer. HostMemoryError: its file cannot grow.
    """
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if full := no_room(error):
            raise full from error
        raise RankTimeoutError(
            f"the store of the process group to answer at {label!r}",
            str(error).partition("\n")[0],
            "The process that holds the store has ended, as a rule that of rank 0. Those who are left can meet in "
            "another store: ep_a2a.survivors(..., store=) or memory.subgroups.make_subgroup(..., store=).",
            missing_ranks=() if peers is None else peers.settle(),
        ) from error


def with_version(values: dict[str, Any]) -> dict[str, Any]:
    """Returns a rank's message with the version of its wire format, for the first meeting of ranks."""
    return {VERSION_KEY: WIRE_FORMAT_VERSION, **values}
