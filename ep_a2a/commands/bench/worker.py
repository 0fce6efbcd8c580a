"""Runs one contender at one point on every rank: prepares and checks it, and only then times it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contenders import ON_SHARED_GPUS, make_contender
from ep_a2a.commands.bench.rows import MAX_REASON_CHARACTERS, Row, Status
from ep_a2a.commands.measure.timing import measure
from ep_a2a.errors import CheckFailedError, UnsupportedError, without_section
from ep_a2a.memory.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.commands.bench.contenders import Contender, Session
    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

_WORST_FIRST = (Status.ERROR, Status.FAILED, Status.UNAVAILABLE)


class _NotRunError(Exception):
    """Raised with (status, reason), the same on all ranks, when some rank cannot go on."""


def run_contender(context: RankContext, workload: Workload, name: str, settings: TimingSettings) -> Row:
    """Checks and times one contender. Collective; returns the same on every rank.

    A contender that raises becomes a row with the reason. After status ERROR the state of the process is unknown: the
    contender's memory stays allocated, and a GPU may be unusable.
    """
    rendezvous = Rendezvous(context.group)
    session: Session | None = None
    timing, status, reason = None, Status.OK, ""
    try:
        contender = _together(rendezvous, "loading", lambda: make_contender(name))
        own_reason = _together(rendezvous, "asking", lambda: _why_not(contender, workload, context))
        why_not = rendezvous.exchange("availability", own_reason)
        if any(why_not):
            raise _NotRunError(Status.UNAVAILABLE, next(text for text in why_not if text))
        session = _together(rendezvous, "preparing", lambda: contender.prepare(workload, context))
        _together(rendezvous, "checking", session.check)
        timing = _together(rendezvous, "timing", lambda: measure(session, context, rendezvous, settings))
        _together(rendezvous, "after the timing", session.check_timed)
    except _NotRunError as end:
        status, reason = end.args
    details = {} if session is None else session.details
    if session is not None and status != Status.ERROR:
        session.close()
    return Row(workload, name, status, reason, timing, details)


def _why_not(contender: Contender, workload: Workload, context: RankContext) -> str | None:
    """Returns why a contender cannot run here; None where it can."""
    if context.ranks_per_gpu > 1 and contender.name not in ON_SHARED_GPUS:
        return "needs a GPU for each rank"
    return contender.unavailable(workload, context.device)


def _together(rendezvous: Rendezvous, label: str, work: Callable[[], Any]) -> Any:
    """Returns the result of `work`; raises _NotRunError on all ranks where it raises on any."""
    value, problem, error = None, None, None
    try:
        value = work()
    except Exception as raised:  # noqa: BLE001 - reported in the contender's row, whatever it is
        error = raised
        text = f"{type(raised).__name__}: {without_section(str(raised))}"
        problem = [_status_of(raised, label), text[:MAX_REASON_CHARACTERS]]
    everyone = rendezvous.exchange(label, problem)
    for status in _WORST_FIRST:
        for rank, each in enumerate(everyone):
            if each is not None and each[0] == status:
                raise _NotRunError(status, f"{label}, rank {rank}: {each[1]}") from error
    return value


def _status_of(error: Exception, label: str) -> Status:
    if isinstance(error, CheckFailedError):
        return Status.FAILED
    if isinstance(error, UnsupportedError) and label == "preparing":
        return Status.UNAVAILABLE
    return Status.ERROR
