"""`ep-a2a backends`: lists backends, their capabilities, and which ones this machine can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands import options as opt

if TYPE_CHECKING:
    from types import SimpleNamespace

OPTIONS = (
    opt.Option("name", str, "One backend, with all its abilities and limits.", panel="Arguments", is_argument=True),
    opt.AS_JSON,
    opt.OUTPUT,
    opt.flag("markdown", "Print the tables of capabilities, without what is found here."),
)


def run(options: SimpleNamespace) -> None:
    """Show which backends can be used here; of one, or with --verbose of all, what they can do."""
    from ep_a2a.commands.backends import execute

    if options.as_json or options.name:
        opt.refuse({"markdown": options.markdown or None}, "with --json or a name", "Leave one out.")
    execute(options)
