"""`ep-a2a doctor`: reports what this machine has, what would go wrong on it, and the remedies."""

from types import SimpleNamespace
from typing import Annotated, Any

import typer

from ep_a2a.cli import options as opt
from ep_a2a.commands.options import Quant

BACKEND = "Backend to judge, as given to init_dist_env; default: the config file's, EP_A2A_BACKEND's."
CONFIG = "Configuration to judge: a TOML file (configs/*.toml); default: EP_A2A_CONFIG."
RANKS = (
    "Ranks of each node, separated by commas; more than GPUs share them. Default: one node with a rank per GPU, or 4 "
    "on CPU."
)
TOKENS = "Tokens per rank; asks `ep-a2a plan` what an op takes."
PAIR_SECS = "With --selftest: seconds to test a pair; default: 2."


def doctor(
    as_json: opt.AsJson = False,
    output: opt.Output = None,
    ask_secs: Annotated[Any, opt.seconds("Seconds that torch may take to import.", least=0.1)] = 120.0,
    backend: Annotated[str | None, typer.Option(help=BACKEND)] = None,
    config: Annotated[str | None, typer.Option(help=CONFIG)] = None,
    ranks_per_node: Annotated[Any, opt.numbers(RANKS, opt.MOST_RANKS, "--ranks-per-node", "--ranks", least=1)] = None,
    hidden: Annotated[int | None, opt.number("Hidden size.", opt.MOST_HIDDEN)] = None,
    max_tokens: Annotated[int | None, opt.number(TOKENS, opt.MOST_TOKENS)] = None,
    quant: opt.Cast = Quant.NONE,
    selftest: Annotated[bool, typer.Option(help="Let every two ranks of this host exchange data.")] = False,
    pair_secs: Annotated[Any, opt.seconds(PAIR_SECS)] = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Say what this machine has, what would go wrong, and what to do.

    With --selftest, try it. The exit code is 1 where something prevents use. The command runs where torch is absent or
    broken.
    """
    options = SimpleNamespace(**locals())
    from ep_a2a.commands.doctor.report import execute
    from ep_a2a.commands.files import check_can_write

    if pair_secs is not None and not selftest:
        raise typer.BadParameter("it bounds what --selftest measures: add that", param_hint="--pair-secs")
    check_can_write(output)
    raise typer.Exit(execute(options))
