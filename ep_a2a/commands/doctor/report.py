"""Writes the report for a terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.diagnostic import Level

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ep_a2a.commands.doctor.diagnostic import Diagnostic

LEVEL_WIDTH = 7
MAX_WIDTH = 110
NO_TROUBLE = "Nothing found that prevents use."


def render(version: str, sections: Mapping[str, Sequence[Diagnostic]], terminal_width: int = MAX_WIDTH) -> str:
    """Returns all diagnostics as text, by section; the last line says whether anything prevents use.

    Args:
        version: of this package.
        sections: diagnostics by heading; an empty section is left out.
        terminal_width: columns to fold at, if they are fewer than MAX_WIDTH.
    """
    lines = [f"ep_a2a {version}"]
    everything = [diagnostic for diagnostics in sections.values() for diagnostic in diagnostics]
    width = max((len(diagnostic.subject) for diagnostic in everything), default=0)
    columns = min(MAX_WIDTH, terminal_width)
    for heading, diagnostics in sections.items():
        if diagnostics:
            lines += ["", heading]
        for diagnostic in diagnostics:
            lines += _lines(diagnostic, width, columns)
    return "\n".join([*lines, "", *textwrap.wrap(_verdict(everything), columns)]) + "\n"


def _lines(diagnostic: Diagnostic, width: int, columns: int) -> list[str]:
    level = diagnostic.level.value
    if diagnostic.level in (Level.WARNING, Level.ERROR):
        level = level.upper()
    start = f"  {level:<{LEVEL_WIDTH}}  {diagnostic.subject:<{width}}  "
    indent = " " * len(start)
    before = []
    if len(start) > columns // 2:
        # Too narrow for a column of texts: they get lines of their own.
        before, start, indent = [start.rstrip()], " " * 4, " " * 4
    texts = [(diagnostic.found, start, indent), (diagnostic.remedy, f"{indent}> ", f"{indent}  ")]
    wrapped = [
        line
        for text, first, rest in texts
        if text
        for line in textwrap.wrap(text, columns, initial_indent=first, subsequent_indent=rest)
    ]
    return [*before, *wrapped] or [start.rstrip()]


def _verdict(diagnostics: Sequence[Diagnostic]) -> str:
    errors = sum(diagnostic.prevents_use for diagnostic in diagnostics)
    warnings = sum(diagnostic.level is Level.WARNING for diagnostic in diagnostics)
    said = f"Errors: {errors}; they prevent use." if errors else NO_TROUBLE
    return f"{said} Warnings: {warnings}." if warnings else said
