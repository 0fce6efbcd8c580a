"""`ep-a2a doctor` in the list of commands; what it does, and its options, are in ep_a2a.commands.doctor."""

import typer

CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True}
"""All options go to a parser of the standard library: the command runs where typer is missing, too."""


def command(context: typer.Context) -> None:
    """Say what this machine has, what would go wrong on it, and what to do; with --selftest, try it.

    The exit code is 1 where something prevents use. It runs where torch is absent or broken.
    """
    from ep_a2a.commands.doctor.command import main

    raise typer.Exit(main(context.args))
