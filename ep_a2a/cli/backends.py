"""`ep-a2a backends`: lists backends, their capabilities, and which ones this machine can use."""

from typing import Annotated

import typer

from ep_a2a.cli.options import AsJson, Output, Quiet, Verbose


def backends(
    name: Annotated[str | None, typer.Argument(help="One backend, with all its abilities and limits.")] = None,
    as_json: AsJson = False,
    output: Output = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show which backends can be used here, and what they can do.

    It tells what they can do of one that is named, and of all with --verbose.
    """
    from ep_a2a.commands.backends import execute

    execute(name, output, as_json=as_json, verbose=verbose)
