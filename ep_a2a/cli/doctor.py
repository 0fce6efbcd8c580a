"""`ep-a2a doctor`: reports what this machine has, what would go wrong on it, and the remedies."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ep_a2a.commands.options import (
    MOST_HIDDEN,
    MOST_RANKS,
    MOST_SECS,
    MOST_TOKENS,
    AsJson,
    OutputFile,
    Quant,
    Quiet,
    Verbose,
)


def _configuration(text: str, **limits: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="A configuration to judge", **limits)


def _selftest(text: str, **limits: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="Self-test", **limits)


def command(
    as_json: AsJson = False,
    output: OutputFile = None,
    ask_secs: Annotated[
        float, typer.Option(min=0.1, max=MOST_SECS, help="Seconds that torch may take to import.")
    ] = 120.0,
    backend: Annotated[
        str | None, _configuration("As given to init_dist_env; default: the config file's, EP_A2A_BACKEND's.")
    ] = None,
    config: Annotated[str | None, _configuration("A TOML file (configs/*.toml); default: EP_A2A_CONFIG.")] = None,
    ranks_per_node: Annotated[
        str | None,
        typer.Option(
            "--ranks-per-node",
            "--ranks",
            rich_help_panel="A configuration to judge",
            help="Ranks of each node, separated by commas; more than GPUs share them. Default: one node with a rank "
            "per GPU, or 4 on CPU.",
        ),
    ] = None,
    hidden: Annotated[int | None, _configuration("Hidden size.", min=1, max=MOST_HIDDEN)] = None,
    max_tokens: Annotated[
        int | None, _configuration("Tokens per rank; asks `ep-a2a plan` what an op takes.", min=1, max=MOST_TOKENS)
    ] = None,
    quant: Annotated[Quant, _configuration("Cast inside dispatch.")] = Quant.NONE,
    selftest: Annotated[bool, _selftest("Let every two ranks of this host exchange data.")] = False,
    pair_secs: Annotated[float | None, _selftest("Seconds to test a pair; default: 2.", min=0, max=MOST_SECS)] = None,
    plot: Annotated[Path | None, _selftest("Draw the rates between ranks as a heat map (PNG).")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say what this machine has, what would go wrong on it, and what to do; with --selftest, try it.

    The exit code is 1 where something prevents use. The command runs where torch is absent or broken.
    """
    from ep_a2a.commands.doctor.machine import Request
    from ep_a2a.commands.doctor.report import execute
    from ep_a2a.commands.files import check_can_write

    if pair_secs is not None and not selftest:
        raise typer.BadParameter("it bounds what --selftest measures: add that", param_hint="--pair-secs")
    if plot is not None:
        if not selftest:
            raise typer.BadParameter("it draws what --selftest measures: add that", param_hint="--plot")
        from ep_a2a.commands.plotting import check_can_plot

        check_can_plot(plot)
    check_can_write(output)
    request = Request(backend, config, _counts(ranks_per_node), hidden, quant.value, max_tokens)
    raise typer.Exit(
        execute(
            request,
            output=output,
            as_json=as_json,
            ask_secs=ask_secs,
            selftest=selftest,
            pair_secs=2.0 if pair_secs is None else pair_secs,
            plot=plot,
        )
    )


def _counts(text: str | None) -> tuple[int, ...]:
    """Returns the numbers between commas, each 1 or more; () without a text."""
    parts = () if text is None else tuple(part.strip() for part in text.split(","))
    if not all(part.isdecimal() and len(part) < 10 and 1 <= int(part) <= MOST_RANKS for part in parts):
        raise typer.BadParameter(
            f"{text!r} is no list of numbers from 1 to {MOST_RANKS} with commas between, as 8,8",
            param_hint="--ranks-per-node",
        )
    return tuple(map(int, parts))
