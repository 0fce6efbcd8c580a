"""The base of all commands: help that is never cut, options common to all, the environment checked before it runs."""

import importlib
import importlib.util
import inspect
from typing import Any

from typer.core import TyperCommand

from ep_a2a.cli.help import options_of
from ep_a2a.commands import messages
from ep_a2a.commands.log import check_environment, set_up_logging
from ep_a2a.commands.messages import EXIT_CODES, Verbosity
from ep_a2a.errors import MissingPackageError
from ep_a2a.interrupts import interrupts_held

DOCTOR = "doctor"
"""The command that reports variables that cannot be used."""
MAX_NAME_COLUMNS = 28
"""In --help, an option whose name is longer has its text on the next line."""


class Command(TyperCommand):
    """A command of `ep-a2a`: help that is never cut, options common to all, environment checked before it runs."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, with verbosity and logging as its options and variables say."""
        given = [each.params for each in (ctx, ctx.parent) if each is not None]
        quiet, verbose = (any(params.get(name) for params in given) for name in ("quiet", "verbose"))
        if quiet and verbose:
            ctx.fail("--quiet and --verbose exclude each other.")
        level = Verbosity.QUIET if quiet else Verbosity.VERBOSE if verbose else Verbosity.NORMAL
        messages.begin(ctx.command_path, {name for each in self.params for name in each.opts}, level)
        if self.name != DOCTOR:
            check_packages()
            check_environment()
            set_up_logging()
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a definition list for each panel of options."""
        panels = options_of(inspect.unwrap(self.callback)) if self.callback is not None else {}
        for panel, rows in panels.items():
            own = [(names, f"{text} [default: {value}]" if value else text) for names, value, text in rows.values()]
            if panel == "Options":
                own.append(("-h, --help", "Show this message and exit."))
            with formatter.section(panel):
                formatter.write_dl(own, col_max=MAX_NAME_COLUMNS)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes the exit codes."""
        write_exit_codes(formatter)

    def get_short_help_str(self, limit: int = 0) -> str:
        """Returns the first paragraph of the help, for the list of commands, whatever its length."""
        return " ".join((self.help or "").partition("\n\n")[0].split())


def check_packages() -> None:
    """Imports torch and Triton, which every command but doctor needs.

    Raises:
        MissingPackageError: one is not installed.
    """
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            remedy = f"pip install {name}; `ep-a2a doctor` says what else is missing."
            raise MissingPackageError(f"the package {name}", "none", remedy)
        # Code that their imports run swallows KeyboardInterrupt: the command would go on.
        with interrupts_held():
            importlib.import_module(name)


def write_exit_codes(formatter: Any) -> None:
    """Writes the exit codes into a command's help."""
    with formatter.section("Exit codes"):
        formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])
