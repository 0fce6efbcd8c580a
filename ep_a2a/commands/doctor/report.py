"""What `ep-a2a doctor` does: probes, checks, the self-test, the report and the exit code."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

import ep_a2a
from ep_a2a.commands import messages
from ep_a2a.commands.doctor.checks import run_checks
from ep_a2a.commands.doctor.finding import Finding, Level, error
from ep_a2a.commands.doctor.machine import Request
from ep_a2a.commands.doctor.probe import choose, find_backend, find_machine
from ep_a2a.commands.files import give_json
from ep_a2a.commands.progress import Progress
from ep_a2a.errors import EpA2AError
from ep_a2a.interrupts import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import SimpleNamespace

    from rich.console import Console

    from ep_a2a.commands.doctor.machine import Machine
    from ep_a2a.commands.doctor.selftest import SelfTest

PAIR_SECS = 2.0
"""Seconds to test a pair, unless --pair-secs says otherwise."""
LOUD = (Level.WARNING, Level.ERROR)
"""Levels in capitals."""
NO_TROUBLE = "Nothing found that prevents use."


def execute(options: SimpleNamespace) -> int:
    """Judges this machine and prints the report; returns 1 where something prevents use, else 0.

    Args:
        options: by name, as cli/doctor.py declares them.
    """
    ranks, quant = options.ranks_per_node or (), options.quant.value
    request = Request(options.backend, options.config, ranks, options.hidden, quant, options.max_tokens)
    machine = find_machine(options.ask_secs)
    choice = choose(request, machine.torch.num_gpus)
    backend = find_backend(choice, request, options.ask_secs)
    choice = replace(choice, kernel=backend.kernel, kernel_reason=backend.kernel_reason)
    machine = replace(machine, request=request, choice=choice, backend=backend)
    sections, test = run_checks(machine), None
    if options.selftest:
        pair_secs = PAIR_SECS if options.pair_secs is None else options.pair_secs
        test, sections["self-test"] = _selftest(machine, pair_secs, options.plot)
    prevented = any(each.level is Level.ERROR for findings in sections.values() for each in findings)
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
        show_findings(messages.output(), sections)
        if test is not None:
            messages.output().print("", Text(test.table), sep="\n", end="", soft_wrap=True)
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
        return None, [error(f"expected {problem.expected}; got {problem.got}", problem.remedy, "self-test")]
    return test, judge(test)


def _not_run(reason: str) -> Finding:
    return error(f"not run: {reason}", "See above.", "self-test")


def show_findings(console: Console, sections: Mapping[str, Sequence[Finding]]) -> None:
    """Prints all findings by section; the last line says whether anything prevents use.

    Args:
        console: where to print.
        sections: findings by heading; an empty section is left out.
    """
    everything = [each for findings in sections.values() for each in findings]
    width = max((len(each.subject) for each in everything), default=0)
    console.print(Text(f"ep_a2a {ep_a2a.__version__}"))
    for heading, findings in sections.items():
        grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=True)
        grid.add_column(min_width=len(Level.WARNING))
        grid.add_column(min_width=width)
        grid.add_column(overflow="fold")
        for each in findings:
            level = each.level.upper() if each.level in LOUD else each.level
            grid.add_row(level, Text(each.subject), Text(each.found))
            if each.remedy:
                grid.add_row("", "", Text(f"> {each.remedy}"))
        if findings:
            console.print("", Text(heading), grid, sep="\n")
    errors, warnings = ([each.level for each in everything].count(level) for level in (Level.ERROR, Level.WARNING))
    verdict = f"Errors: {errors}; they prevent use." if errors else NO_TROUBLE
    console.print("", Text(verdict + (f" Warnings: {warnings}." if warnings else "")), sep="\n")
