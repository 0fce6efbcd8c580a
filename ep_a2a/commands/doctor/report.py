"""Writes the report for a terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.diagnostic import Level

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ep_a2a.commands.doctor.diagnostic import Diagnostic

LEVEL_WIDTH = 7
WIDTH = 110
NO_TROUBLE = "Nothing found that prevents use."


def render(version: str, sections: Mapping[str, Sequence[Diagnostic]]) -> str:
    """Returns all diagnostics as text, by section; the last line says whether anything prevents use.

    Args:
        version: of this package.
        sections: diagnostics by heading; an empty section is left out.
    """
    lines = [f"ep_a2a {version}"]
    everything = [diagnostic for diagnostics in sections.values() for diagnostic in diagnostics]
    width = max((len(diagnostic.subject) for diagnostic in everything), default=0)
    for heading, diagnostics in sections.items():
        if diagnostics:
            lines += ["", heading]
        for diagnostic in diagnostics:
            lines += _lines(diagnostic, width)
    return "\n".join([*lines, "", _verdict(everything)]) + "\n"


def _lines(diagnostic: Diagnostic, width: int) -> list[str]:
    level = diagnostic.level.value
    if diagnostic.level in (Level.WARNING, Level.ERROR):
        level = level.upper()
    start = f"  {level:<{LEVEL_WIDTH}}  {diagnostic.subject:<{width}}  "
    indent = " " * len(start)
    lines = textwrap.wrap(diagnostic.found, WIDTH, initial_indent=start, subsequent_indent=indent) or [start.rstrip()]
    if diagnostic.remedy:
        lines += textwrap.wrap(diagnostic.remedy, WIDTH, initial_indent=f"{indent}> ", subsequent_indent=f"{indent}  ")
    return lines


def _verdict(diagnostics: Sequence[Diagnostic]) -> str:
    errors = sum(diagnostic.prevents_use for diagnostic in diagnostics)
    warnings = sum(diagnostic.level is Level.WARNING for diagnostic in diagnostics)
    said = f"Errors: {errors}; they prevent use." if errors else NO_TROUBLE
    return f"{said} Warnings: {warnings}." if warnings else said
