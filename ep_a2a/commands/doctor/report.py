"""What `ep-a2a doctor` does: probes, checks, the self-test, the report and the exit code."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

import ep_a2a
from ep_a2a.commands import messages
from ep_a2a.commands.doctor.checks import Finding, Level, error, run_checks
from ep_a2a.commands.doctor.probe import ask_backend, choose, find_machine
from ep_a2a.commands.files import give_json
from ep_a2a.errors import EpA2AError
from ep_a2a.interrupts import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import SimpleNamespace

    from rich.console import Console

    from ep_a2a.commands.doctor.machine import Choice, Machine
    from ep_a2a.commands.doctor.selftest import SelfTest

NO_TROUBLE = "Nothing found that prevents use."


def execute(options: SimpleNamespace) -> int:
    """Judge this machine and print the report; return 1 where something prevents use, else 0.

    Args:
        options: by name, as cli/doctor.py declares them.
    """
    machine, test = find_machine(), None
    choice = choose(machine.num_gpus, options.backend, options.config, options.ranks_per_node)
    choice = ask_backend(choice)
    sections = run_checks(machine, choice)
    if options.selftest:
        test, sections["self-test"] = _selftest(machine, choice)
    prevented = any(each.level is Level.ERROR for findings in sections.values() for each in findings)
    report = {
        "ep_a2a": ep_a2a.__version__,
        "usable": not prevented,
        "findings": [{"section": name, **asdict(each)} for name, findings in sections.items() for each in findings],
        "choice": asdict(choice),
        "machine": asdict(machine),
        "selftest": test and asdict(test),
    }
    give_json(report, options.output, as_json=options.as_json)
    if not options.as_json:
        show_findings(messages.output(), sections)
    return messages.EXIT_MISMATCH if prevented else messages.EXIT_OK


def _selftest(machine: Machine, choice: Choice) -> tuple[SelfTest | None, list[Finding]]:
    if machine.lacks:
        return None, [error("self-test", f"not run: it needs {machine.lacks}", "See above.")]
    try:
        # It imports torch, and code that its import runs swallows KeyboardInterrupt.
        with interrupts_held():
            from ep_a2a.commands.doctor.selftest import judge, run_selftest

        test = run_selftest(choice.device, choice.ranks_per_node[0])
    except ImportError as problem:
        return None, [error("self-test", f"not run: {problem}", "See above.")]
    except EpA2AError as problem:
        return None, [error("self-test", f"expected {problem.expected}; got {problem.got}", problem.remedy)]
    return test, judge(test)


def show_findings(console: Console, sections: Mapping[str, Sequence[Finding]]) -> None:
    """Print all findings by section; the last line says whether anything prevents use.

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
            level = each.level.upper() if each.level in (Level.WARNING, Level.ERROR) else each.level
            grid.add_row(level, Text(each.subject), Text(each.found))
            if each.remedy:
                grid.add_row("", "", Text(f"> {each.remedy}"))
        if findings:
            console.print("", Text(heading), grid, sep="\n")
    errors, warnings = ([each.level for each in everything].count(level) for level in (Level.ERROR, Level.WARNING))
    verdict = f"Errors: {errors}; they prevent use." if errors else NO_TROUBLE
    console.print("", Text(verdict + (f" Warnings: {warnings}." if warnings else "")), sep="\n")
