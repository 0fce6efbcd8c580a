"""What `ep-a2a doctor` does: probes, checks, the self-test, the report and the exit code."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ep_a2a
from ep_a2a.commands.doctor.backend_verdict import Request, judge_backend, requested_backend, requested_ranks
from ep_a2a.commands.doctor.checks import run_checks
from ep_a2a.commands.doctor.diagnostic import Diagnostic, error
from ep_a2a.commands.doctor.probe import PROBE_SECS, find_system_info
from ep_a2a.commands.doctor.report import render
from ep_a2a.commands.doctor.subprocess_probe import plan_bytes
from ep_a2a.commands.options import Quant
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ep_a2a.commands.doctor.backend_verdict import BackendVerdict
    from ep_a2a.commands.doctor.selftest import SelfTest
    from ep_a2a.commands.doctor.system_info import SystemInfo

EXIT_PREVENTED = 1


@dataclass(frozen=True)
class DoctorOptions:
    """The options of the command; cli/doctor.py describes them.

    Attributes:
        json: print one JSON object.
        ask_secs: how long torch may take to import.
        backend, config, ranks_per_node, hidden, max_tokens, quant: the configuration to judge, as in Request.
        selftest, pair_secs, plot: whether to run the self-test, seconds for each pair, and where to draw the rates.
    """

    json: bool = False
    ask_secs: float = PROBE_SECS
    backend: str | None = None
    config: str | None = None
    ranks_per_node: tuple[int, ...] = ()
    hidden: int | None = None
    max_tokens: int | None = None
    quant: Quant = Quant.NONE
    selftest: bool = False
    pair_secs: float = 2.0
    plot: Path | None = None


def counts(text: str) -> tuple[int, ...]:
    """Numbers of ranks, separated by commas, each 1 or more; ValueError for other text."""
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


PARSERS: dict[str, Callable[[str], Any]] = {
    "ask_secs": float, "ranks_per_node": counts, "hidden": int, "max_tokens": int, "quant": Quant, "pair_secs": float,
    "plot": Path,
}  # fmt: skip
"""By option that has a value other than text."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command where typer is missing, with the same options; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ep-a2a doctor", description="`ep-a2a doctor --help` describes the options.")
    for field in fields(DoctorOptions):
        name = f"--{field.name.replace('_', '-')}"
        if field.default is False:
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=PARSERS.get(field.name, str), default=field.default)
    return execute(DoctorOptions(**vars(parser.parse_args(arguments))))


def execute(options: DoctorOptions) -> int:
    """Judges this machine and prints the report; returns 1 where something prevents use, else 0."""
    request = Request(
        options.backend, options.config, options.ranks_per_node, options.hidden, options.quant.value, options.max_tokens
    )
    backend = requested_backend(request)
    info = find_system_info(options.ask_secs, backend)
    sections = run_checks(info)
    verdict = judge_backend(info, _with_bytes(info, request, backend))
    sections["what a group gets"] = list(verdict.diagnostics)
    test: SelfTest | None = None
    if options.selftest:
        test, sections["self-test"] = _selftest(info, verdict, options)
    prevented = any(diagnostic.prevents_use for diagnostics in sections.values() for diagnostic in diagnostics)
    if options.json:
        report = _as_json(info, sections, verdict, test) | {"usable": not prevented}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(render(ep_a2a.__version__, sections))
        if test is not None:
            from ep_a2a.commands.doctor.selftest import table

            sys.stdout.write(f"\n{table(test)}")
    return EXIT_PREVENTED if prevented else 0


def _with_bytes(info: SystemInfo, request: Request, backend: str) -> Request:
    if request.max_tokens is None or backend != DEFAULT_BACKEND:
        return request
    num_ranks = sum(requested_ranks(info, request))
    return replace(request, needed_bytes=plan_bytes(num_ranks, request.max_tokens, request.hidden_dim, request.quant))


def _selftest(
    info: SystemInfo, verdict: BackendVerdict, options: DoctorOptions
) -> tuple[SelfTest | None, list[Diagnostic]]:
    for name, works in (("torch", info.torch.works), ("triton", info.triton.works)):
        if not works:
            return None, [error("self-test", f"not run: it needs {name}", "See above.")]
    try:
        from ep_a2a.commands.doctor.selftest import judge, run_selftest
        from ep_a2a.commands.plotting import check_can_plot, plot_matrix
    except ImportError as problem:
        return None, [error("self-test", f"not run: {problem}", "See above.")]
    from ep_a2a.errors import EpA2AError

    try:
        if options.plot is not None:
            check_can_plot(options.plot)
        test = run_selftest(verdict.device, verdict.ranks_per_node[0], options.pair_secs, _show_progress)
        if options.plot is not None:
            plot_matrix(test.gb_per_s, f"pushes on {verdict.device}", "GB/s", options.plot, digits=3)
    except EpA2AError as problem:
        return None, [error("self-test", f"expected {problem.expected}; got {problem.got}", problem.remedy)]
    return test, judge(test)


def _show_progress(pair: tuple[int, int]) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"ranks {pair[0]} and {pair[1]}\n")


def _as_json(
    info: SystemInfo, sections: dict[str, list[Diagnostic]], verdict: BackendVerdict, test: SelfTest | None
) -> dict[str, Any]:
    return {
        "ep_a2a": ep_a2a.__version__,
        "usable": True,
        "findings": [
            {"section": section, **diagnostic.as_json_object()}
            for section, diagnostics in sections.items()
            for diagnostic in diagnostics
        ],
        "choice": {name: value for name, value in asdict(verdict).items() if name != "diagnostics"},
        "machine": asdict(info),
        "selftest": None if test is None else test.as_json_object(),
    }
