"""Makes the typer application: commands, common options, and the display of errors.

A command is a module `ep_a2a.cli.<name>` with a function `command`. It imports torch and the rest of the package inside
that function, so that `--help` is quick.
"""

import importlib
from typing import Annotated

import typer

from ep_a2a import __version__
from ep_a2a.commands.log import set_up_logging
from ep_a2a.errors import EpA2AError

DOCTOR = "doctor"
COMMANDS = ("demo", "bench", "trace", "tune", "plan", "backends", DOCTOR)
"""In the order of `--help`."""
EXIT_ERROR = 2
"""The request cannot be done. Exit code 1 is a command's own: it ran and found a mismatch."""


def run() -> None:
    """Runs the command line; an error of this package becomes one panel on stderr and exit code 2."""
    try:
        make_app()()
    except EpA2AError as error:
        show_error(error)
        raise SystemExit(EXIT_ERROR) from None


def make_app() -> typer.Typer:
    """Returns the application with all commands."""
    app = typer.Typer(name="ep-a2a", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_common_options)
    for name in COMMANDS:
        module = importlib.import_module(f"ep_a2a.cli.{name}")
        app.command(name)(module.command)
    return app


def show_error(error: EpA2AError) -> None:
    """Prints an error as a panel on stderr."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    parts = Table.grid(padding=(0, 2))
    parts_of_text = {"expected": error.expected, "got": error.got, "remedy": error.remedy, "see": error.section}
    for label, text in parts_of_text.items():
        # Text, not markup: error texts contain shapes in square brackets.
        parts.add_row(Text(label, style="bold"), Text(text))
    Console(stderr=True).print(Panel(parts, title=type(error).__name__, title_align="left", border_style="red"))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ep-a2a {__version__}")
        raise typer.Exit


def _common_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Expert-parallel all-to-all for MoE inference."""
    # The doctor reports a level that cannot be used, among other variables.
    if context.invoked_subcommand != DOCTOR:
        set_up_logging()
