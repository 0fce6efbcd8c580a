"""The command line `ep-a2a`: each command is one module of this package, listed in app.COMMANDS."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; see ep_a2a.cli.app."""
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
