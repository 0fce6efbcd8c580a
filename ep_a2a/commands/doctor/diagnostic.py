"""Diagnostics, and the tables of checks that make them from a SystemInfo."""

from __future__ import annotations

import enum
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ep_a2a.commands.doctor.system_info import gibibytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ep_a2a.commands.doctor.system_info import SystemInfo


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
        """Whether the package cannot be used before this is mended."""
        return self.level is Level.ERROR

    def as_json_object(self) -> dict[str, str]:
        """The fields as text."""
        return {"subject": self.subject, "level": self.level.value, "found": self.found, "remedy": self.remedy}


def ok(subject: str, found: str) -> Diagnostic:
    """Makes a diagnostic of a part that works."""
    return Diagnostic(subject, OK, found)


def note(subject: str, found: str, remedy: str = "") -> Diagnostic:
    """Makes a diagnostic that is worth knowing."""
    return Diagnostic(subject, NOTE, found, remedy)


def warning(subject: str, found: str, remedy: str) -> Diagnostic:
    """Makes a diagnostic of a part that may be slow or fail."""
    return Diagnostic(subject, WARNING, found, remedy)


def error(subject: str, found: str, remedy: str) -> Diagnostic:
    """Makes a diagnostic that prevents use."""
    return Diagnostic(subject, ERROR, found, remedy)


class _Template(string.Formatter):
    """`str.format` with format specs `dotted`, `listed` and, for numbers of bytes, `KiB`, `MiB`, `GiB`."""

    UNITS: ClassVar[dict[str, int]] = {"KiB": 1 << 10, "MiB": 1 << 20}

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in ("dotted", "listed"):
            return {"dotted": ".", "listed": ", "}[format_spec].join(map(str, value or "?"))
        if format_spec in self.UNITS:
            return str(value // self.UNITS[format_spec])
        return gibibytes(value) if format_spec == "GiB" else str(super().format_field(value, format_spec))


@dataclass(frozen=True)
class Case:
    """One row of a check: a condition, and the diagnostic where it holds.

    Attributes:
        level: of the diagnostic.
        when: the condition, on the item that the check looks at.
        found, remedy: templates, in which `it` is the item.
    """

    level: Level
    when: Callable[[Any], object]
    found: str
    remedy: str = ""


class Check:
    """A table of cases; for each item the first case that holds makes a diagnostic.

    Args:
        subject: template of the diagnostics' subject.
        items: gives what the check looks at.
        cases: in the order in which they are tried.
    """

    def __init__(self, subject: str, items: Callable[[SystemInfo], Iterable[Any]], *cases: Case) -> None:
        self.subject, self.cases, self.items = subject, cases, items

    def __call__(self, info: SystemInfo) -> list[Diagnostic]:
        """The diagnostics of a machine."""
        diagnostics = []
        for item in self.items(info):
            case = next((each for each in self.cases if each.when(item)), None)
            if case is not None:
                texts = (_Template().format(text, it=item) for text in (self.subject, case.found, case.remedy))
                subject, found, remedy = texts
                diagnostics.append(Diagnostic(subject, case.level, found, remedy))
        return diagnostics


def the_machine(info: SystemInfo) -> tuple[SystemInfo]:
    """Returns the whole machine as the one item of a check."""
    return (info,)


def always(item: object) -> bool:
    """Holds for every item: the condition of a check's last case."""
    return True
