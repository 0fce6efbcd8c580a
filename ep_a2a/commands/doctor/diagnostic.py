"""What a check says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How much a finding matters; in ascending order."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        subject: what it is about, in a word or two.
        level: OK and NOTE need nothing done; a WARNING will be slow or may fail; an ERROR prevents use.
        found: what was found, in words.
        remedy: what the reader can do now; "" where nothing needs doing.
    """

    subject: str
    level: Level
    found: str
    remedy: str = ""

    @property
    def prevents_use(self) -> bool:
        """Whether the package cannot be used before this is mended."""
        return self.level is Level.ERROR

    def as_json_object(self) -> dict[str, str]:
        """The fields as text."""
        return {"subject": self.subject, "level": self.level.value, "found": self.found, "remedy": self.remedy}


def ok(subject: str, found: str) -> Finding:
    """A finding that is as it should be."""
    return Finding(subject, Level.OK, found)


def note(subject: str, found: str, remedy: str = "") -> Finding:
    """A finding that is worth knowing."""
    return Finding(subject, Level.NOTE, found, remedy)


def warning(subject: str, found: str, remedy: str) -> Finding:
    """A finding that will be slow or may fail."""
    return Finding(subject, Level.WARNING, found, remedy)


def error(subject: str, found: str, remedy: str) -> Finding:
    """A finding that prevents use."""
    return Finding(subject, Level.ERROR, found, remedy)
