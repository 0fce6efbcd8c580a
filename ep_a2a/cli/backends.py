"""`ep-a2a backends`: lists backends, their capabilities, and which ones this machine can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ep_a2a.commands import options as opt

if TYPE_CHECKING:
    from types import SimpleNamespace

OPTIONS = (
    opt.Option("name", str, "One backend, with all its abilities and limits.", panel="Arguments", is_argument=True),
    opt.AS_JSON,
    opt.OUTPUT,
    opt.flag("markdown", "Print the tables of capabilities, without what is found here."),
    opt.QUIET,
    opt.VERBOSE,
)


def run(options: SimpleNamespace) -> None:
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

    if options.as_json or options.name:
        refuse({"markdown": options.markdown or None}, "with --json or a name", "Leave one out.")
    check_can_write(options.output)
    backends = registered_backends(looks_here=not options.markdown)
    chosen = backends if options.name is None else [backend_named(options.name, backends)]
    give_json({each.name: each.as_json_object() for each in chosen}, options.output, as_json=options.as_json)
    console = messages.output()
    if options.markdown:
        typer.echo(markdown_of(backends))
    elif options.name is not None and not options.as_json:
        console.print(one_view(chosen[0]))
    elif not options.as_json:
        console.print(available_view(backends, reasons=options.verbose))
        if options.verbose:
            console.print(*capability_views(backends, console.width))
        else:
            messages.note("`ep-a2a backends NAME` describes one and says why it cannot be used; -v describes all.")
