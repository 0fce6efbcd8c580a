"""Says what stands beside a command's result, on stderr: notes, files written, errors; knows how much is to be said."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.text import Text

from ep_a2a import env
from ep_a2a.errors import EnvironmentVariableError, EpA2AError

EXIT_OK, EXIT_MISMATCH, EXIT_ERROR = 0, 1, 2
"""Exit codes of all commands; --help and docs/cli.md say what they mean."""

_invocation = SimpleNamespace(quiet=False, verbose=False)


def begin(*, quiet: bool, verbose: bool) -> None:
    """Notes how much the command that runs shall say: results only, or details, too."""
    _invocation.quiet, _invocation.verbose = quiet, verbose


def output() -> Console:
    """Returns a console for results: stdout, in the colours and width of its terminal."""
    return Console()


def notices() -> Console:
    """Returns a console for notes and progress: stderr, silent with --quiet."""
    return Console(stderr=True, quiet=_invocation.quiet)


def note(text: str, console: Console | None = None) -> None:
    """Prints a line on stderr unless --quiet is given; console: that of `notices` which shows a status meanwhile."""
    # Text: a style of print itself would reach the status, too
    (console or notices()).print(Text(text, style="dim"), soft_wrap=True)


def confirm(path: Path) -> None:
    """Says on stderr that a file has been written, unless --quiet is given."""
    note(f"written: {path}")


def print_json(values: Any) -> None:
    """Prints one JSON object on stdout."""
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def show_error(error: EpA2AError) -> None:
    """Prints an error on stderr: what was expected, what was found, what to do."""
    from rich.panel import Panel
    from rich.table import Table

    console = Console(stderr=True)
    parts = (("expected", error.expected), ("got", error.got), ("remedy", error.remedy), ("see", error.section))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    # Folded, not cut: paths and names are longer than a line.
    grid.add_column(overflow="fold")
    for label, text in parts:
        # Text, not markup: error texts contain shapes in square brackets.
        grid.add_row(Text(label, style="bold"), Text(text))
    console.print(Panel(grid, title=type(error).__name__, title_align="left", border_style="red"))


def log_level() -> str:
    """Returns the level's name: EP_A2A_LOG_LEVEL's, else INFO with --verbose.

    Raises:
        EnvironmentVariableError: EP_A2A_LOG_LEVEL names no level.
    """
    level, known = env.LOG_LEVEL.get(), logging.getLevelNamesMapping()
    if level not in known:
        raise EnvironmentVariableError(f"{env.LOG_LEVEL.name} to be one of {', '.join(known)}", repr(level))
    return "INFO" if _invocation.verbose and not env.other_variable(env.LOG_LEVEL.name) else level


def set_up_logging(level: str | None = None) -> None:
    """Sends the `ep_a2a` logger to stderr.

    Args:
        level: its name; None takes log_level().

    Raises:
        EnvironmentVariableError: as `log_level`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s [%(process)d] %(levelname)s: %(message)s"))
    logger = logging.getLogger("ep_a2a")
    logger.setLevel(level or log_level())
    logger.handlers[:] = [handler]
    logger.propagate = False
