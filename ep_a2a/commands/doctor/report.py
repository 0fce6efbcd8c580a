"""What `ep-a2a doctor` does: probes, checks, the self-test, the report and the exit code."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import ep_a2a
from ep_a2a.commands import messages
from ep_a2a.commands.doctor.checks import run_checks
from ep_a2a.commands.doctor.choice import choose, requested_backend
from ep_a2a.commands.doctor.finding import Finding, Level, error, refused
from ep_a2a.commands.doctor.machine import Request
from ep_a2a.commands.doctor.probe import find_machine, plan_bytes
from ep_a2a.commands.files import give_json
from ep_a2a.commands.progress import Progress
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import EpA2AError
from ep_a2a.interrupts import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import SimpleNamespace

    from ep_a2a.commands.doctor.machine import Machine
    from ep_a2a.commands.doctor.selftest import SelfTest

PAIR_SECS = 2.0
"""Seconds to test a pair, unless --pair-secs says otherwise."""
LEVEL_WIDTH = 7
MAX_WIDTH = 110
NO_TROUBLE = "Nothing found that prevents use."


def execute(options: SimpleNamespace) -> int:
    """Judges this machine and prints the report; returns 1 where something prevents use, else 0.

    Args:
        options: by name, as cli/doctor.py declares them.
    """
    ranks, quant = options.ranks_per_node or (), options.quant.value
    request = Request(options.backend, options.config, ranks, options.hidden, quant, options.max_tokens)
    machine = find_machine(options.ask_secs, requested_backend(request))
    choice = choose(machine, request)
    asks_plan = request.max_tokens is not None and choice.backend == DEFAULT_BACKEND
    needed = plan_bytes(request, sum(choice.ranks_per_node)) if asks_plan else None
    machine = replace(machine, request=request, choice=choice, needed_bytes=needed)
    sections, test = run_checks(machine), None
    if options.selftest:
        pair_secs = PAIR_SECS if options.pair_secs is None else options.pair_secs
        test, sections["self-test"] = _selftest(machine, pair_secs, options.plot)
    prevented = any(each.prevents_use for findings in sections.values() for each in findings)
    facts = asdict(machine)
    report = {
        "ep_a2a": ep_a2a.__version__,
        "usable": not prevented,
        "findings": [{"section": name, **asdict(each)} for name, findings in sections.items() for each in findings],
        "choice": facts.pop("choice"),
        "machine": facts,
        "selftest": None if test is None else test.as_json_object(),
    }
    give_json(report, options.output, as_json=options.as_json)
    if not options.as_json:
        columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns
        sys.stdout.write(render(ep_a2a.__version__, sections, columns) + ("" if test is None else f"\n{test.table}"))
    return messages.EXIT_MISMATCH if prevented else messages.EXIT_OK


def _selftest(machine: Machine, pair_secs: float, plot: Path | None) -> tuple[SelfTest | None, list[Finding]]:
    for name, works in (("torch", machine.torch.works), ("triton", machine.triton.works)):
        if not works:
            return None, [_not_run(f"it needs {name}")]
    try:
        # They import torch, and code that its import runs swallows KeyboardInterrupt.
        with interrupts_held():
            from ep_a2a.commands.doctor.selftest import judge, plot_rates, run_selftest

        num_ranks = machine.choice.ranks_per_node[0]
        with Progress("testing", math.comb(num_ranks, 2) + 1, messages.notices()) as progress:
            test = run_selftest(machine.choice.device, num_ranks, pair_secs, progress)
        if plot is not None:
            plot_rates(test, plot)
    except ImportError as problem:
        return None, [_not_run(str(problem))]
    except EpA2AError as problem:
        return None, [replace(refused(problem), subject="self-test")]
    return test, judge(test)


def _not_run(reason: str) -> Finding:
    return error(f"not run: {reason}", "See above.", "self-test")


def render(version: str, sections: Mapping[str, Sequence[Finding]], terminal_width: int = MAX_WIDTH) -> str:
    """Returns all findings as text, by section; the last line says whether anything prevents use.

    Args:
        version: of this package.
        sections: findings by heading; an empty section is left out.
        terminal_width: columns to fold at, if they are fewer than MAX_WIDTH.
    """
    lines, columns = [f"ep_a2a {version}"], min(MAX_WIDTH, terminal_width)
    everything = [each for findings in sections.values() for each in findings]
    width = max((len(each.subject) for each in everything), default=0)
    for heading, findings in sections.items():
        lines += ["", heading] if findings else []
        for each in findings:
            level = each.level.upper() if each.level in (Level.WARNING, Level.ERROR) else each.level
            lines += _folded(f"  {level:<{LEVEL_WIDTH}}  {each.subject:<{width}}  ", each, columns)
    errors = sum(each.prevents_use for each in everything)
    warnings = sum(each.level is Level.WARNING for each in everything)
    verdict = f"Errors: {errors}; they prevent use." if errors else NO_TROUBLE
    verdict += f" Warnings: {warnings}." if warnings else ""
    return "\n".join([*lines, "", *textwrap.wrap(verdict, columns)]) + "\n"


def _folded(start: str, finding: Finding, columns: int) -> list[str]:
    """Returns the lines of a finding; where the terminal is narrow, its texts get lines of their own."""
    head, indent = [], " " * len(start)
    if len(start) > columns // 2:
        head, start, indent = [start.rstrip()], " " * 4, " " * 4
    found = textwrap.wrap(finding.found, columns, initial_indent=start, subsequent_indent=indent)
    remedy = textwrap.wrap(finding.remedy, columns, initial_indent=f"{indent}> ", subsequent_indent=f"{indent}  ")
    return [*head, *(found or [start.rstrip()]), *remedy]
