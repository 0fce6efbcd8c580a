"""The command line `ep-a2a`: each command is one module of this package, listed in app.COMMANDS."""

from __future__ import annotations

import atexit
import signal
import sys


def main() -> None:
    """Runs the command line; see ep_a2a.cli.app."""
    # Python ends with the signal, not with the exit code, where Ctrl-C has passed through an exec() of text, as imports
    # have it. It cannot while the signal is blocked; this runs after all else that is registered.
    atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT})
    # Processes that a command starts import this package too and need nothing of the application.
    try:
        from ep_a2a.cli.app import run
    except ImportError as error:
        sys.stderr.write(f"ep-a2a cannot start: {error}. To install what it needs: pip install typer rich\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()
