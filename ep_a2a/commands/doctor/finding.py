"""A check of the doctor and the finding that it returns."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.machine import Machine


class Level(enum.StrEnum):
    """How much a finding matters, in ascending order."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: OK and NOTE need no action; a WARNING may be slow or fail; an ERROR prevents use of the package
            until the reader applies the remedy.
        found: the fact.
        remedy: what the reader can do now; "" where nothing needs doing.
        subject: the part of the machine, in a word or two; "" takes the check's name.
    """

    level: Level
    found: str
    remedy: str = ""
    subject: str = ""


ok, note, warning, error = (functools.partial(Finding, level) for level in Level)
Findings: TypeAlias = Finding | Iterable[Finding] | None


@dataclass(frozen=True)
class Check:
    """One row of the table of checks.

    Attributes:
        section: heading of the report under which its findings stand.
        name: what it looks at; the subject of its findings, unless they name another.
        judge: returns what it finds on a machine; None where there is nothing to say.
        only: whether a machine has what the check looks at.
    """

    section: str
    name: str
    judge: Callable[[Machine], Findings]
    only: Callable[[Machine], object] = bool  # true of every machine

    def findings(self, machine: Machine) -> list[Finding]:
        """Returns what the check finds, each with a subject."""
        found = self.judge(machine) if self.only(machine) else None
        several = [] if found is None else [found] if isinstance(found, Finding) else found
        return [Finding(one.level, one.found, one.remedy, one.subject or self.name) for one in several]
