"""The typer application: the commands, what they do alike, and the display of errors.

A command is a function in a module of its own name. It imports torch and the rest of the package inside, so that
`--help` is quick.
"""

import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ep_a2a import __version__, env
from ep_a2a.cli import backends, bench, demo, doctor, plan, trace
from ep_a2a.cli.options import Quiet, Verbose
from ep_a2a.commands import messages
from ep_a2a.commands.options import OPTIONS_OF_FIELDS
from ep_a2a.config.requirements import HANDLE_KWARG_REMEDY
from ep_a2a.errors import ConfigError, EpA2AError, MissingPackageError
from ep_a2a.interrupts import interrupts_held

EXIT_CODES = (
    "Exit codes: 0 it worked; 1 it ran and found a mismatch: wrong results, or something that prevents use; 2 it "
    "cannot be done: a wrong option or variable, a missing package, a file that cannot be written; 130 interrupted."
)
SETTINGS = {"help_option_names": ["-h", "--help"]}


class Command(TyperCommand):
    """A command of `ep-a2a`: checks the environment before it runs, and names options in errors."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, with verbosity and logging as its options and variables say."""
        given = [each.params for each in (ctx, ctx.parent)]
        quiet, verbose = (any(params.get(name) for params in given) for name in ("quiet", "verbose"))
        if quiet and verbose:
            ctx.fail("--quiet and --verbose exclude each other.")
        messages.begin(quiet=quiet, verbose=verbose)
        ctx.params["verbose"] = verbose
        # doctor reports what is missing and which variables cannot be used.
        if self.name != "doctor":
            check_packages()
            env.check_values()
            messages.set_up_logging()
        try:
            return super().invoke(ctx)
        except EpA2AError as error:
            typed = {each.name: each.opts[0] for each in self.params}
            named = OPTIONS_OF_FIELDS.get(error.field or "", (error.field,))
            error.field = next((typed[name] for name in named if name in typed), error.field)
            if isinstance(error, ConfigError) and error.remedy in (ConfigError.remedy, HANDLE_KWARG_REMEDY):
                error.remedy = f"Correct the option; `{ctx.command_path} --help` says what it takes."
            raise


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


def show_version(asked: bool) -> None:
    """Prints the version and ends, where that is asked for."""
    if asked:
        typer.echo(f"ep-a2a {__version__}")
        raise typer.Exit


# Plain help: a terminal's width does not cut the names of options.
app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=SETTINGS
)
for command in (demo.demo, bench.bench, trace.trace, plan.plan, backends.backends, doctor.doctor):
    app.command(cls=Command, epilog=EXIT_CODES, context_settings=SETTINGS)(command)


@app.callback(epilog=f"`ep-a2a COMMAND -h` lists a command's options. {EXIT_CODES}")
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=show_version, is_eager=True)
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Expert-parallel all-to-all for MoE inference."""


def run(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; an error is one panel on stderr."""
    try:
        if sys.stdout is None:
            raise ConfigError("an open standard output", "a closed one", "Run it without `>&-`.")
        try:
            app(arguments, prog_name="ep-a2a")
        finally:
            sys.stdout.flush()
    except EpA2AError as error:
        messages.show_error(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        remedy = "Make room where standard output goes."
        messages.show_error(ConfigError("to write to standard output", error.strerror or str(error), remedy))
        # the interpreter would try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(messages.EXIT_ERROR)
