"""Diagnostics, and the rows of the tables that make them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ep_a2a.errors import EpA2AError


class Level(enum.Enum):
    """How much a diagnostic matters, in ascending order."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


OK, NOTE, WARNING, ERROR = Level


@dataclass(frozen=True)
class Diagnostic:
    """One line of the report.

    Attributes:
        subject: the part of the machine, in a word or two.
        level: OK and NOTE need no action; a WARNING may be slow or fail; an ERROR prevents use.
        found: the fact.
        remedy: what the reader can do now; "" where nothing needs doing.
    """

    subject: str
    level: Level
    found: str
    remedy: str = ""

    @property
    def prevents_use(self) -> bool:
        """Whether the package cannot be used until the reader applies the remedy."""
        return self.level is Level.ERROR

    def as_json_object(self) -> dict[str, str]:
        """Returns the fields as text."""
        return {"subject": self.subject, "level": self.level.value, "found": self.found, "remedy": self.remedy}


Row: TypeAlias = tuple[Level, object, str] | tuple[Level, object, str, str]
"""One row of a table of checks: level, condition, found, and the remedy where there is one.

A table evaluates the texts of all its rows, so a text must be valid where its condition does not hold, too.
"""


def every(subject: str, *rows: Row) -> list[Diagnostic]:
    """Returns the diagnostics of all rows whose conditions hold."""
    return [Diagnostic(subject, level, *texts) for level, holds, *texts in rows if holds]


def first(subject: str, *rows: Row) -> list[Diagnostic]:
    """Returns the diagnostic of the first row whose condition holds; [] where none does."""
    return every(subject, *rows)[:1]


def refused(subject: str, problem: EpA2AError) -> Diagnostic:
    """Returns the diagnostic of an error of this package."""
    return Diagnostic(subject, ERROR, f"expected {problem.expected}; got {problem.got}", problem.remedy)
