"""`ep-a2a backends`: lists backends, their capabilities, and which ones this machine can use."""

from typing import Annotated

import typer

from ep_a2a.commands.options import Quiet, Verbose


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of capabilities, without what is found here.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what each backend can do, and which can be used here."""
    import json

    from rich.console import Console

    from ep_a2a.commands.backends import available_view, capability_views, markdown_of, registered_backends
    from ep_a2a.commands.options import refuse

    refuse({"markdown": as_markdown or None} if as_json else {}, "with --json", "Leave one of them out.")
    backends = registered_backends(looks_here=not as_markdown)
    if as_json:
        typer.echo(json.dumps({each.name: each.as_json_object() for each in backends}, indent=2))
    elif as_markdown:
        typer.echo(markdown_of(backends))
    else:
        Console().print(available_view(backends), *capability_views(backends))
