"""Makes the typer application: commands, common options and exit codes, help, and the display of errors.

A command is a module `ep_a2a.cli.<name>` with a table `OPTIONS` and a function `run`. It imports torch and the rest of
the package inside that function, so that `--help` is quick.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from ep_a2a import __version__
from ep_a2a.cli.command import Command, callback_of, options_of, write_exit_codes
from ep_a2a.commands import messages
from ep_a2a.commands.files import cannot_print, cannot_write
from ep_a2a.commands.messages import EXIT_ERROR, EXIT_INTERRUPTED
from ep_a2a.commands.options import OF_ALL_COMMANDS, flag
from ep_a2a.errors import ConfigError, EpA2AError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import SimpleNamespace

COMMANDS = ("demo", "bench", "trace", "plan", "backends", "doctor")
"""In the order of `--help`."""
OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF)
"""Errors of writing to stdout; those of files have a name."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with one of EXIT_CODES; an error is one panel on stderr."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show µ shows a question mark.
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    say_interrupted.cache_clear()
    try:
        if sys.stdout is None:
            raise ConfigError("an open standard output", "a closed one", "Run it without `>&-`.")
        code = _code_of(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = say_interrupted()
    except EpA2AError as error:
        code = EXIT_ERROR
        messages.show_error(error)
    except OSError as error:
        if error.filename is None and error.errno not in OF_OUTPUT:
            raise
        code = EXIT_ERROR
        messages.show_error(cannot_write(error.filename, error) if error.filename else cannot_print(error))
        if error.filename is None:
            _drop_output()
    sys.exit(code)


def make_app() -> typer.Typer:
    """Returns the application with all commands."""
    settings = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(
        name="ep-a2a",
        cls=Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=settings,
        epilog="`ep-a2a COMMAND -h` lists a command's options.",
    )
    version = flag("version", "Print the version and exit.", limits={"callback": _show_version, "is_eager": True})
    app.callback()(callback_of((version, *OF_ALL_COMMANDS), _common_options))
    for name in COMMANDS:
        module = importlib.import_module(f"ep_a2a.cli.{name}")
        app.command(name, cls=Command, context_settings=settings)(callback_of(options_of(name), module.run))
    return app


@functools.cache
def say_interrupted() -> int:
    """Says once that Ctrl-C has ended the command; returns its exit code. A second Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    messages.warn("interrupted")
    return EXIT_INTERRUPTED


class Group(TyperGroup):
    """The command `ep-a2a` itself: Ctrl-C while a command runs is said in one word."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes where options are listed, and the exit codes."""
        super().format_epilog(ctx, formatter)
        write_exit_codes(formatter)

    def invoke(self, ctx: Any) -> Any:
        """Runs the named command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(say_interrupted()) from None
        except BrokenPipeError as error:
            # typer would end with 1 and without a word.
            raise cannot_print(error) from error


def _code_of(arguments: Sequence[str] | None) -> int:
    try:
        make_app()(arguments, prog_name="ep-a2a")
    except SystemExit as ended:
        if ended.code == EXIT_INTERRUPTED:
            # Outside of a command, typer ends without a word.
            say_interrupted()
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else EXIT_ERROR
    return 0


def _drop_output() -> None:
    """Lets the interpreter flush what is left in stdout's buffer without an error."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ep-a2a {__version__}")
        raise typer.Exit


def _common_options(options: SimpleNamespace) -> None:
    """Expert-parallel all-to-all for MoE inference."""
