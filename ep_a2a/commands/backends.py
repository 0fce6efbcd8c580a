"""Shows backends and their capabilities as tables on a terminal, as markdown and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from rich.text import Text

from ep_a2a.commands.tables import fitting_tables, new_table, table_lines
from ep_a2a.errors import UnknownNameError, did_you_mean
from ep_a2a.managers.availability import problems
from ep_a2a.managers.capabilities import NEEDS, TABLES, Capabilities
from ep_a2a.managers.registry import aliases_of, available_backends, manager_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import RenderableType

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Backend:
    """One row of the tables.

    Attributes:
        name, aliases: as `create_manager` takes them.
        capabilities: of its manager.
        package, version: of the library that it needs, "" without one; the version that is installed, if any.
        install: how to get the library.
        problems: why it cannot be used here; () where it can, or where that was not checked.
    """

    name: str
    aliases: tuple[str, ...]
    capabilities: Capabilities
    package: str
    version: str
    install: str
    problems: tuple[str, ...]

    def as_json_object(self) -> dict[str, Any]:
        """Returns the fields for --json."""
        return {**dataclasses.asdict(self), "available": not self.problems}

    def cells(self, table: str) -> dict[str, str]:
        """Returns the text by column of one of TABLES."""
        texts = {title: _text(value) for title, value in self.capabilities.by_table(table).items()}
        return {"library": self.package or "none", **texts} if table == NEEDS else texts


def registered_backends(*, looks_here: bool) -> list[Backend]:
    """Returns all registered backends that are manager classes.

    Args:
        looks_here: import their libraries and look for GPUs.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for name in available_backends():
        manager = manager_type(name)
        if manager is None:
            continue
        library = manager.library
        package, install, version = "", "", None
        if library is not None:
            package, install = library.distribution, library.install
            version = library.version if looks_here else None
        here = problems(manager, device_type) if looks_here else ()
        found.append(Backend(name, aliases_of(name), manager.capabilities, package, version or "", install, here))
    return found


def backend_named(name: str, backends: Sequence[Backend]) -> Backend:
    """Returns the backend of this name or alias.

    Raises:
        UnknownNameError: there is none.
    """
    known = {called: each for each in backends for called in (each.name, *each.aliases)}
    if name not in known:
        raise UnknownNameError(f"a backend: {', '.join(known)}", repr(name), did_you_mean(name, known) or None)
    return known[name]


def available_view(backends: Iterable[Backend], *, reasons: bool) -> Table:
    """Returns a table of the backends that can be used here, and why the others cannot: in full, or in a few words."""
    title = "Backends on this machine"
    if reasons:
        table = new_table(title, ("backend", "also called", "here", "why not"))
    else:
        table = new_table(title, ("backend", "here", "why not"))
        table.box = None
    table.columns[0].no_wrap = True
    for each in backends:
        here = "no" if each.problems else "yes"
        why = "; ".join(each.problems if reasons else [each.problems[0].partition(" (")[0]] if each.problems else [])
        names = (each.name, ", ".join(each.aliases)) if reasons else (each.name,)
        table.add_row(*(Text(text) for text in (*names, here, why)))
    return table


def one_view(backend: Backend) -> RenderableType:
    """Returns all about one backend, a line for each ability or limit."""
    here = "; ".join(backend.problems) or "yes"
    facts = {"backend": backend.name, "also called": ", ".join(backend.aliases) or "-", "can be used here": here}
    grid = Table.grid(padding=(0, 2))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for title, rows in ("", facts), *((title, backend.cells(name)) for name, title in TABLES.items()):
        if title:
            grid.add_row()
            grid.add_row(Text(title, style="bold"))
        for label, text in rows.items():
            grid.add_row(Text(label), Text(text))
    return grid


def capability_views(backends: Sequence[Backend], width: int) -> list[Table]:
    """Returns the tables of TABLES, each in as many parts as fit the width."""
    views = []
    for name, title in TABLES.items():
        rows = [(each.name, *each.cells(name).values()) for each in backends]
        headings = ("backend", *backends[0].cells(name))
        views += fitting_tables(title, headings, rows, num_names=1, width=width)
    return views


def markdown_of(backends: Sequence[Backend]) -> str:
    """Returns the tables of capabilities in markdown, the same on every machine."""
    parts = []
    for name, title in TABLES.items():
        columns = ("backend", *backends[0].cells(name))
        rows = [(f"`{each.name}`", *each.cells(name).values()) for each in backends]
        parts.append("\n".join([f"## {title}", "", *table_lines(columns, rows)]))
    return "\n\n".join(parts)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        separator = "; " if any(" " in str(each) for each in value) else ", "
        names = SHORT if all(each in SHORT for each in value) else {}
        return separator.join(str(names.get(each, each)) for each in value) or "any"
    return str(value) if value else "any"
