"""`ep-a2a doctor`: reports what this machine has, what would go wrong on it, and the remedies."""

from types import SimpleNamespace
from typing import Annotated, Any

import typer

from ep_a2a.cli import options as opt

BACKEND = "Backend to judge, as given to init_dist_env; default: the config file's, EP_A2A_BACKEND's."
CONFIG = "Configuration to judge: a TOML file (configs/*.toml); default: EP_A2A_CONFIG."
RANKS = (
    "Ranks of each node, separated by commas; more than GPUs share them. Default: one node with a rank per GPU, or 4 "
    "on CPU."
)


def doctor(
    as_json: opt.AsJson = False,
    output: opt.Output = None,
    backend: Annotated[str | None, typer.Option(help=BACKEND)] = None,
    config: Annotated[str | None, typer.Option(help=CONFIG)] = None,
    ranks_per_node: Annotated[Any, opt.numbers(RANKS, opt.MOST_RANKS, "--ranks-per-node", "--ranks", least=1)] = None,
    selftest: Annotated[bool, typer.Option(help="Let every two ranks of this host exchange data.")] = False,
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

    check_can_write(output)
    raise typer.Exit(execute(options))
