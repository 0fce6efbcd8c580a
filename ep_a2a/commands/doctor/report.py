"""The report on a terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.diagnostic import Level

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ep_a2a.commands.doctor.diagnostic import Finding

LEVEL_WIDTH = 7
WIDTH = 110
NO_TROUBLE = "Nothing found that prevents use."


def render(version: str, sections: Mapping[str, Sequence[Finding]]) -> str:
    """All findings as text, by section, and a last line that says whether anything prevents use.

    Args:
        version: of this package.
        sections: findings by heading; an empty section is left out.
    """
    lines = [f"ep_a2a {version}"]
    everything = [finding for findings in sections.values() for finding in findings]
    width = max((len(finding.subject) for finding in everything), default=0)
    for heading, findings in sections.items():
        if findings:
            lines += ["", heading]
        for finding in findings:
            lines += _lines(finding, width)
    return "\n".join([*lines, "", _verdict(everything)]) + "\n"


def _lines(finding: Finding, width: int) -> list[str]:
    level = finding.level.value
    if finding.level in (Level.WARNING, Level.ERROR):
        level = level.upper()
    start = f"  {level:<{LEVEL_WIDTH}}  {finding.subject:<{width}}  "
    indent = " " * len(start)
    lines = textwrap.wrap(finding.found, WIDTH, initial_indent=start, subsequent_indent=indent) or [start.rstrip()]
    if finding.remedy:
        lines += textwrap.wrap(finding.remedy, WIDTH, initial_indent=f"{indent}> ", subsequent_indent=f"{indent}  ")
    return lines


def _verdict(findings: Sequence[Finding]) -> str:
    errors = sum(finding.prevents_use for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    said = f"Errors: {errors}; they prevent use." if errors else NO_TROUBLE
    return f"{said} Warnings: {warnings}." if warnings else said
