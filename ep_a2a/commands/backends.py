"""Shows backends and their capabilities as tables on a terminal and as JSON."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from rich.text import Text

from ep_a2a.commands import messages
from ep_a2a.commands.files import check_can_write, give_json
from ep_a2a.commands.tables import new_table
from ep_a2a.errors import UnknownNameError, did_you_mean
from ep_a2a.managers.capabilities import NEEDS, TABLES, Capabilities, problems
from ep_a2a.managers.registry import aliases_of, available_backends, manager_type

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Backend:
    """One row of the tables.

    Attributes:
        name, aliases: as `create_manager` takes them.
        capabilities: of its manager.
        package, version: of the library that it needs, "" without one; the version that is installed, if any.
        install: how to get the library.
        problems: why it cannot be used here; () where it can.
    """

    name: str
    aliases: tuple[str, ...]
    capabilities: Capabilities
    package: str
    version: str
    install: str
    problems: tuple[str, ...]

    def cells(self, table: str) -> dict[str, str]:
        """Returns the text by column of one of TABLES."""
        texts = {title: _text(value) for title, value in self.capabilities.by_table(table).items()}
        return {"library": self.package or "none", **texts} if table == NEEDS else texts


def execute(name: str | None, output: Path | None, *, as_json: bool, verbose: bool) -> None:
    """Shows all backends, or the one of a name or alias.

    Args:
        name: of one backend; None shows all. output, as_json: where to write all that is known.
        verbose: tell all about each.

    Raises:
        UnknownNameError: there is no such backend.
    """
    check_can_write(output)
    backends = registered_backends()
    chosen = backends if name is None else [_named(name, backends)]
    found = {each.name: {**dataclasses.asdict(each), "available": not each.problems} for each in chosen}
    give_json(found, output, as_json=as_json)
    console = messages.output()
    if as_json:
        return
    if name is None:
        console.print(_table_of_use(backends), "")
    if name is not None or verbose:
        console.print(*map(_all_about, chosen), sep="\n\n")
    else:
        messages.note("`ep-a2a backends NAME` describes one and says why it cannot be used; -v describes all.")


def registered_backends() -> list[Backend]:
    """Returns all registered backends that are manager classes; imports their libraries and looks for GPUs."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    backends = []
    for name in available_backends():
        manager = manager_type(name)
        if manager is None:
            continue
        found, here = manager.library, problems(manager, device_type)
        library = ("", "", "") if found is None else (found.distribution, found.version or "", found.install)
        backends.append(Backend(name, aliases_of(name), manager.capabilities, *library, here))
    return backends


def _named(name: str, backends: Iterable[Backend]) -> Backend:
    known = {called: each for each in backends for called in (each.name, *each.aliases)}
    if name not in known:
        raise UnknownNameError(f"a backend: {', '.join(known)}", repr(name), did_you_mean(name, known) or None)
    return known[name]


def _table_of_use(backends: Iterable[Backend]) -> Table:
    """Returns a table of the backends that can be used here, and why the others cannot, in a few words."""
    table = new_table("Backends on this machine", ("backend", "here", "why not"))
    table.columns[0].no_wrap = True
    table.box = None
    for each in backends:
        why = "".join(each.problems[:1]).partition(" (")[0]
        table.add_row(*map(Text, (each.name, "no" if each.problems else "yes", why)))
    return table


def _all_about(backend: Backend) -> Table:
    """Returns all about one backend, a line for each ability or limit."""
    here = "; ".join(backend.problems) or "yes"
    facts = {"backend": backend.name, "also called": ", ".join(backend.aliases) or "-", "can be used here": here}
    grid = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2))
    for title, rows in ("", facts), *((title, backend.cells(name)) for name, title in TABLES.items()):
        if title:
            grid.add_row()
            grid.add_row(Text(title, style="bold"))
        for label, text in rows.items():
            grid.add_row(Text(label), Text(text))
    return grid


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        separator = "; " if any(" " in str(each) for each in value) else ", "
        names = SHORT if all(each in SHORT for each in value) else {}
        return separator.join(str(names.get(each, each)) for each in value) or "any"
    return str(value) if value else "any"
