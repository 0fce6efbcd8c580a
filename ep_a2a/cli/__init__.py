"""The command line `ep-a2a`: each command is one module of this package, listed in app.COMMANDS."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; see ep_a2a.cli.app. `ep-a2a doctor` runs without typer and rich, too."""
    # Processes that a command starts import this package too and need nothing of the application.
    try:
        from ep_a2a.cli.app import run
    except ImportError as error:
        if sys.argv[1:2] == ["doctor"]:
            from ep_a2a.commands.doctor.command import main as see_doctor

            sys.exit(see_doctor(sys.argv[2:]))
        sys.exit(f"ep-a2a cannot start: {error}. `ep-a2a doctor` says what is missing.")
    run()
