"""The command: options, order of work, exit code."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ep_a2a
from ep_a2a.commands.doctor.backend_verdict import Choice, Request, asked_backend, asked_ranks, choose
from ep_a2a.commands.doctor.checks import run_checks
from ep_a2a.commands.doctor.diagnostic import Finding, error
from ep_a2a.commands.doctor.probe import ASK_SECS, find_machine
from ep_a2a.commands.doctor.report import render
from ep_a2a.commands.doctor.subprocess_probe import plan_bytes
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.commands.doctor.selftest import SelfTest
    from ep_a2a.commands.doctor.system_info import Machine

EXIT_PREVENTED = 1
QUANTS = ("none", "fp8_per_token", "fp8_per_1x128")
DEFAULT_PAIR_SECS = 2.0


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns 1 where something prevents use, else 0."""
    options = _parser().parse_args(arguments)
    request = Request(
        options.backend, options.config, options.ranks_per_node, options.hidden, options.quant, options.max_tokens
    )
    backend = asked_backend(request)
    machine = find_machine(options.ask_secs, backend)
    sections = run_checks(machine)
    choice = choose(machine, _with_bytes(machine, request, backend))
    sections["what a group gets"] = list(choice.findings)
    test: SelfTest | None = None
    if options.selftest:
        test, sections["self-test"] = _selftest(machine, choice, options)
    prevented = any(finding.prevents_use for findings in sections.values() for finding in findings)
    if options.json:
        sys.stdout.write(json.dumps(_as_json(machine, sections, choice, test, prevented), indent=2) + "\n")
    else:
        sys.stdout.write(render(ep_a2a.__version__, sections))
        if test is not None:
            from ep_a2a.commands.doctor.selftest import table

            sys.stdout.write(f"\n{table(test)}")
    return EXIT_PREVENTED if prevented else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ep-a2a doctor", description="Say what this machine has, what would go wrong, and what to do about it. "
        "The exit code is 1 where something prevents use.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--ask-secs", type=float, default=ASK_SECS, help="how long torch may take to import")
    group = parser.add_argument_group("a configuration to judge")
    group.add_argument("--backend", help="as given to init_dist_env; default: the config file's, EP_A2A_BACKEND's")
    group.add_argument("--config", metavar="FILE", help="a TOML file (configs/*.toml); default: EP_A2A_CONFIG")
    group.add_argument(
        "--ranks-per-node", type=_counts, default=(), metavar="N[,N...]",
        help="ranks of each node; default: one node with a rank per GPU, or 4 on CPU",
    )  # fmt: skip
    group.add_argument("--hidden", type=int, help="hidden size")
    group.add_argument("--max-tokens", type=int, help="tokens per rank; asks `ep-a2a plan` what an op takes")
    group.add_argument("--quant", choices=QUANTS, default="none", help="cast inside dispatch")
    group = parser.add_argument_group("self-test")
    group.add_argument("--selftest", action="store_true", help="let every two ranks of this host exchange data")
    group.add_argument("--pair-secs", type=float, default=DEFAULT_PAIR_SECS, help="how long to test a pair")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates between ranks as a heat map (PNG)")
    return parser


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise ValueError(text)
    return counts


def _with_bytes(machine: Machine, request: Request, backend: str) -> Request:
    if request.max_tokens is None or backend != DEFAULT_BACKEND:
        return request
    num_ranks = sum(asked_ranks(machine, request))
    return replace(request, needed_bytes=plan_bytes(num_ranks, request.max_tokens, request.hidden_dim, request.quant))


def _selftest(machine: Machine, choice: Choice, options: argparse.Namespace) -> tuple[SelfTest | None, list[Finding]]:
    for name, library in (("torch", machine.torch), ("triton", machine.triton)):
        if library.version is None or library.problem:
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
        num_ranks = choice.ranks_per_node[0]
        test = run_selftest(choice.device, num_ranks, options.pair_secs, _show_progress)
        if options.plot is not None:
            plot_matrix(test.gb_per_s, f"pushes on {choice.device}", "GB/s", options.plot, digits=3)
    except EpA2AError as problem:
        return None, [error("self-test", f"expected {problem.expected}; got {problem.got}", problem.remedy)]
    return test, judge(test)


def _show_progress(pair: tuple[int, int]) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"ranks {pair[0]} and {pair[1]}\n")


def _as_json(
    machine: Machine, sections: dict[str, list[Finding]], choice: Choice, test: SelfTest | None, prevented: bool
) -> dict[str, Any]:
    return {
        "ep_a2a": ep_a2a.__version__,
        "usable": not prevented,
        "findings": [
            {"section": section, **finding.as_json_object()}
            for section, findings in sections.items()
            for finding in findings
        ],
        "choice": {name: value for name, value in asdict(choice).items() if name != "findings"},
        "machine": asdict(machine),
        "selftest": None if test is None else test.as_json_object(),
    }
