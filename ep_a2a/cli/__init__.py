"""The command line `ep-a2a`: each command is one module of this package."""

import atexit
import signal
import sys
from collections.abc import Callable

EXIT_INTERRUPTED = 130
"""Of typer, where Ctrl-C has ended a command."""


def _application() -> Callable[[], None]:
    # Processes that a command starts import this package too and need nothing of the application.
    try:
        from ep_a2a.cli.app import run
    except ImportError as error:
        sys.stderr.write(f"ep-a2a cannot start: {error}. To install what it needs: pip install typer rich\n")
        sys.exit(2)
    return run


def main() -> None:
    """Runs the command line; see ep_a2a.cli.app."""
    # Python ends with the signal, not with the exit code, where Ctrl-C has passed through an exec() of text, as imports
    # have it. It cannot while the signal is blocked; this runs after all else that is registered.
    atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT})
    code: str | int | None = 0
    try:
        _application()()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stderr.write("interrupted\n")
    sys.exit(code)
