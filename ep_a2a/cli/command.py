"""The base of all commands: parameters by their table of options, help that is never cut, the environment checked."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from ep_a2a.commands import messages
from ep_a2a.commands.messages import EXIT_CODES, check_environment, set_up_logging
from ep_a2a.commands.options import OF_ALL_COMMANDS, option_of_field
from ep_a2a.config.requirements import HANDLE_KWARG_REMEDY
from ep_a2a.errors import ConfigError, EpA2AError, MissingPackageError
from ep_a2a.interrupts import interrupts_held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ep_a2a.commands.options import Option

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
        messages.begin(quiet=quiet, verbose=verbose)
        if self.name != DOCTOR:
            check_packages()
            check_environment()
            set_up_logging()
        try:
            return super().invoke(ctx)
        except EpA2AError as error:
            if error.field is not None:
                error.field = option_of_field(options_of(self.name or ""), error.field)
            if isinstance(error, ConfigError) and error.remedy in (ConfigError.remedy, HANDLE_KWARG_REMEDY):
                error.remedy = f"Correct the option; `{ctx.command_path} --help` says what it takes."
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a definition list for each panel of options."""
        for panel, rows in panels_of(options_of(self.name or "")).items():
            own = [(shown, f"{text} [default: {value}]" if value else text) for shown, value, text in rows]
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


def options_of(command: str) -> tuple[Option, ...]:
    """Returns the options of the module `ep_a2a.cli.<command>`, and those of all commands."""
    own: tuple[Option, ...] = importlib.import_module(f"ep_a2a.cli.{command}").OPTIONS
    return own + OF_ALL_COMMANDS


def panels_of(options: Iterable[Option]) -> dict[str, list[tuple[str, str, str]]]:
    """Returns the rows of options by panel, in their order."""
    panels: dict[str, list[tuple[str, str, str]]] = {}
    for each in options:
        panels.setdefault(each.panel, []).append(each.row)
    return panels


def callback_of(options: Iterable[Option], run: Callable[[SimpleNamespace], int | None]) -> Callable[..., None]:
    """Returns the function of a command for typer, which reads its signature: a parameter for each option.

    Args:
        options: the command's table.
        run: takes the values by the options' names; returns the exit code, None for 0. Its docstring is the help.
    """

    def command(**values: Any) -> None:
        if code := run(values_of(options, values)):
            raise typer.Exit(code)

    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature([_parameter(each) for each in options])  # type: ignore[attr-defined]
    return command


def values_of(options: Iterable[Option], typed: Mapping[str, Any]) -> SimpleNamespace:
    """Returns the values of options by name, read from what was typed."""
    values = dict(typed)
    for each in options:
        if isinstance(typed[each.name], float) and math.isnan(typed[each.name]):
            # ranges of older versions of typer let it through
            raise typer.BadParameter("it is not a number", param_hint=each.typed[0])
        if each.read is not None and typed[each.name] is not None:
            values[each.name] = each.read(each.typed[0], typed[each.name])
    return SimpleNamespace(**values)


def _parameter(option: Option) -> inspect.Parameter:
    kind = option.kind if option.default is not None else option.kind | None
    if option.is_argument:
        info = typer.Argument(option.default, metavar=option.name.upper(), help=option.help)
    else:
        info = typer.Option(option.default, *option.names, help=option.help, **option.limits)
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


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
