"""`ep-a2a backends`: lists backends, their capabilities, and which ones this machine can use."""

from types import SimpleNamespace
from typing import Annotated

import typer

from ep_a2a.cli.options import AsJson, Output, Quiet, Verbose
from ep_a2a.commands.options import refuse


def backends(
    name: Annotated[str | None, typer.Argument(help="One backend, with all its abilities and limits.")] = None,
    as_json: AsJson = False,
    output: Output = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of capabilities, without what is found here.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show which backends can be used here, and what they can do.

    It tells what they can do of one that is named, and of all with --verbose.
    """
    options = SimpleNamespace(**locals())
    from ep_a2a.commands.backends import execute

    if as_json or name:
        refuse({"markdown": markdown or None}, "with --json or a name", "Leave one out.")
    execute(options)
