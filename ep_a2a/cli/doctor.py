"""`ep-a2a doctor`: reports what this machine has, what would go wrong on it, and the remedies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from ep_a2a.commands import options as opt

if TYPE_CHECKING:
    from types import SimpleNamespace

TO_JUDGE = "A configuration to judge"
SELF_TEST = "Self-test"
BACKEND = "As given to init_dist_env; default: the config file's, EP_A2A_BACKEND's."
RANKS = (
    "Ranks of each node, separated by commas; more than GPUs share them. Default: one node with a rank per GPU, or 4 "
    "on CPU."
)
SECS_TO_IMPORT = {"min": 0.1, "max": opt.MOST_SECS}
SECS_OF_A_PAIR = {"min": 0, "max": opt.MOST_SECS}


def read_counts(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers between commas, each 1 or more."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(part.isdecimal() and len(part) < 10 and 1 <= int(part) <= opt.MOST_RANKS for part in parts):
        expected = f"{text!r} is no list of numbers from 1 to {opt.MOST_RANKS} with commas between, as 8,8"
        raise typer.BadParameter(expected, param_hint=option)
    return tuple(map(int, parts))


OPTIONS = (
    opt.AS_JSON,
    opt.OUTPUT,
    opt.Option("ask_secs", float, "Seconds that torch may take to import.", 120.0, limits=SECS_TO_IMPORT),
    opt.Option("backend", str, BACKEND, panel=TO_JUDGE),
    opt.Option("config", str, "A TOML file (configs/*.toml); default: EP_A2A_CONFIG.", panel=TO_JUDGE),
    opt.Option(
        "ranks_per_node",
        str,
        RANKS,
        names=("--ranks-per-node", "--ranks"),
        panel=TO_JUDGE,
        read=read_counts,
    ),
    opt.number("hidden", "Hidden size.", opt.MOST_HIDDEN, panel=TO_JUDGE),
    opt.number("max_tokens", "Tokens per rank; asks `ep-a2a plan` what an op takes.", opt.MOST_TOKENS, panel=TO_JUDGE),
    dataclasses.replace(opt.QUANT, panel=TO_JUDGE),
    opt.Option("selftest", bool, "Let every two ranks of this host exchange data.", False, panel=SELF_TEST),
    opt.Option("pair_secs", float, "Seconds to test a pair; default: 2.", panel=SELF_TEST, limits=SECS_OF_A_PAIR),
)


def run(options: SimpleNamespace) -> int:
    """Say what this machine has, what would go wrong on it, and what to do; with --selftest, try it.

    The exit code is 1 where something prevents use. The command runs where torch is absent or broken.
    """
    from ep_a2a.commands.doctor.report import execute
    from ep_a2a.commands.files import check_can_write

    if options.pair_secs is not None and not options.selftest:
        raise typer.BadParameter("it bounds what --selftest measures: add that", param_hint="--pair-secs")
    check_can_write(options.output)
    return execute(options)
