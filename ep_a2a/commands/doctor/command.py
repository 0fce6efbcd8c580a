"""What `ep-a2a doctor` does: probes, checks, the self-test, the report and the exit code."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import ep_a2a
from ep_a2a.commands import messages
from ep_a2a.commands.doctor.backend_verdict import judge_backend, requested_backend, requested_ranks
from ep_a2a.commands.doctor.checks import run_checks
from ep_a2a.commands.doctor.diagnostic import ERROR, Diagnostic, refused
from ep_a2a.commands.doctor.probe import find_system_info
from ep_a2a.commands.doctor.report import MAX_WIDTH, render
from ep_a2a.commands.doctor.subprocess_probe import plan_bytes
from ep_a2a.commands.files import give_json
from ep_a2a.commands.progress import Progress
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import EpA2AError
from ep_a2a.interrupts import interrupts_held

if TYPE_CHECKING:
    from pathlib import Path

    from ep_a2a.commands.doctor.backend_verdict import BackendVerdict, Request
    from ep_a2a.commands.doctor.selftest import SelfTest
    from ep_a2a.commands.doctor.system_info import SystemInfo


def execute(
    request: Request,
    *,
    output: Path | None,
    as_json: bool,
    ask_secs: float,
    selftest: bool,
    pair_secs: float,
    plot: Path | None,
) -> int:
    """Judges this machine and prints the report; returns 1 where something prevents use, else 0.

    Args:
        request: the configuration to judge.
        output: file for one JSON object. as_json: print it.
        ask_secs: seconds that torch may take to import.
        selftest, pair_secs, plot: whether to run the self-test, seconds for each pair, and where to draw the rates.
    """
    backend = requested_backend(request)
    info = find_system_info(ask_secs, backend)
    if request.max_tokens is not None and backend == DEFAULT_BACKEND:
        sizes = sum(requested_ranks(info, request)), request.max_tokens, request.hidden_dim, request.quant
        request = replace(request, needed_bytes=plan_bytes(*sizes))
    sections = run_checks(info)
    verdict = judge_backend(info, request)
    sections["what a group gets"] = list(verdict.diagnostics)
    test = None
    if selftest:
        test, sections["self-test"] = _selftest(info, verdict, pair_secs, plot)
    findings = [(section, each) for section, diagnostics in sections.items() for each in diagnostics]
    prevented = any(each.prevents_use for _, each in findings)
    report = {
        "ep_a2a": ep_a2a.__version__,
        "usable": not prevented,
        "findings": [{"section": section, **each.as_json_object()} for section, each in findings],
        "choice": {name: value for name, value in asdict(verdict).items() if name != "diagnostics"},
        "machine": asdict(info),
        "selftest": None if test is None else test.as_json_object(),
    }
    give_json(report, output, as_json=as_json)
    if not as_json:
        sys.stdout.write(render(ep_a2a.__version__, sections, _columns()) + ("" if test is None else f"\n{test.table}"))
    return messages.EXIT_MISMATCH if prevented else messages.EXIT_OK


def _columns() -> int:
    """Returns the columns of the terminal; also without rich, which is not installed where only doctor can run."""
    return shutil.get_terminal_size((MAX_WIDTH, 24)).columns


def _selftest(
    info: SystemInfo, verdict: BackendVerdict, pair_secs: float, plot: Path | None
) -> tuple[SelfTest | None, list[Diagnostic]]:
    for name, works in (("torch", info.torch.works), ("triton", info.triton.works)):
        if not works:
            return None, [_not_run(f"it needs {name}")]
    try:
        # They import torch, and code that its import runs swallows KeyboardInterrupt.
        with interrupts_held():
            from ep_a2a.commands.doctor.picture import plot_rates
            from ep_a2a.commands.doctor.selftest import judge, num_parts, run_selftest
            from ep_a2a.commands.plotting import check_can_plot

        if plot is not None:
            check_can_plot(plot)
        num_ranks = verdict.ranks_per_node[0]
        with Progress("testing", num_parts(num_ranks), messages.notices()) as progress:
            test = run_selftest(verdict.device, num_ranks, pair_secs, progress)
        if plot is not None:
            plot_rates(test, plot)
    except ImportError as problem:
        return None, [_not_run(str(problem))]
    except EpA2AError as problem:
        return None, [refused("self-test", problem)]
    return test, judge(test)


def _not_run(reason: str) -> Diagnostic:
    return Diagnostic("self-test", ERROR, f"not run: {reason}", "See above.")
