"""`ep-a2a backends`: lists backends, their capabilities, and which ones this machine can use."""

from typing import Annotated

import typer

from ep_a2a.commands.options import AsJson, OutputFile, Quiet, Verbose


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One backend, with all its abilities and limits.")
    ] = None,
    as_json: AsJson = False,
    output: OutputFile = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables of capabilities, without what is found here.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show which backends can be used here; of one, or with --verbose of all, what they can do."""
    from ep_a2a.commands import messages
    from ep_a2a.commands.backends import (
        available_view,
        backend_named,
        capability_views,
        markdown_of,
        one_view,
        registered_backends,
    )
    from ep_a2a.commands.files import check_can_write, give_json
    from ep_a2a.commands.options import refuse

    refuse({"markdown": as_markdown or None} if as_json or name else {}, "with --json or a name", "Leave one out.")
    check_can_write(output)
    backends = registered_backends(looks_here=not as_markdown)
    chosen = backends if name is None else [backend_named(name, backends)]
    give_json({each.name: each.as_json_object() for each in chosen}, output, as_json=as_json)
    console = messages.output()
    if as_markdown:
        typer.echo(markdown_of(backends))
    elif name is not None and not as_json:
        console.print(one_view(chosen[0]))
    elif not as_json:
        console.print(available_view(backends, reasons=verbose))
        if verbose:
            console.print(*capability_views(backends, console.width))
        else:
            messages.note("`ep-a2a backends NAME` describes one and says why it cannot be used; -v describes all.")
