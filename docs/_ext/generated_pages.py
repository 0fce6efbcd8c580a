"""Sphinx extension: writes the parts of pages that come from the code, and puts bench/results on the site.

A page asks for a part by a comment line, `<!-- generated: errors -->`. The part replaces the comment when the page is
read, with all lines up to `<!-- end -->` where there is one, so that headings, links and anchors in it are as good as
written ones.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sphinx.application import Sphinx

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))
RESULTS = PROJECT / "bench" / "results"
MARK = re.compile(r"^<!-- generated: (\w+) -->$(?:(?:(?!<!-- generated).)*?^<!-- end -->$)?", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"\bdocs/([\w-]+)\.md\b")
RESULT_LINK = re.compile(r"\]\((?:\.\./)*bench/results/([\w.-]+\.md)")


def cell(value: object) -> str:
    """Text for one cell of a Markdown table."""
    return re.sub(r"\s+", " ", str(value)).replace("|", r"\|").strip()


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    names = list(headings)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines)


def sections(docstring: str | None) -> tuple[str, dict[str, str]]:
    """The text of a Google-style docstring, and its `Attributes:` by name."""
    text, _, rest = inspect.cleandoc(docstring or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in rest.splitlines():
        if start := re.match(r" {4}(\w[\w, ]*): (.*)", line):
            names = [name.strip() for name in start[1].split(",")]
            found |= dict.fromkeys(names, start[2])
        elif line.startswith(" " * 8) and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif line.strip():
            names = []
    return text.strip(), found


def environment() -> str:
    """The table of EP_A2A_* variables."""
    from ep_a2a import env

    rows = [(f"`{each.name}`", each.default, each.expects, each.doc) for each in env.VARIABLES]
    return table(("variable", "default", "value", "meaning"), rows)


def errors() -> str:
    """A section for each error class: when it is raised, what it is, the remedy."""
    from ep_a2a import errors as module

    parts = []
    for kind in vars(module).values():
        if not (isinstance(kind, type) and issubclass(kind, module.EpA2AError)):
            continue
        text, attributes = sections(kind.__doc__)
        text = re.sub(r"\n*Args:\n.*", "", text, flags=re.DOTALL)
        bases = [
            f"[`{b.__name__}`](#{b.__name__.lower()})" if b.__module__ == module.__name__ else f"`{b.__name__}`"
            for b in kind.__bases__
        ]
        lines = [f"({kind.__name__.lower()})=\n## {kind.__name__}", text, f"*Remedy:* {kind.remedy}"]
        lines += [f"- `{name}`: {meaning}" for name, meaning in attributes.items()]
        lines.append(f"*Caught as:* {', '.join(bases)}.")
        parts.append("\n\n".join(lines))
    return "\n\n".join(parts)


def commands() -> str:
    """A section for each command of `ep-a2a`, with its options as typer lists them.

    Options that most commands have are named at the end of a section; the page describes them once.
    """
    import typer

    from ep_a2a.cli.app import app

    found = typer.main.get_command(app).commands
    records = {
        name: [each.get_help_record(typer.Context(command)) for each in command.params]
        for name, command in found.items()
    }
    counts = Counter(record for of_command in records.values() for record in of_command)
    shared = {record for record, count in counts.items() if count > len(found) // 2}
    parts = []
    for name, command in found.items():
        rows = [(f"`{typed}`", text) for typed, text in records[name] if (typed, text) not in shared]
        also = ", ".join(f"`{typed}`" for typed, text in records[name] if (typed, text) in shared)
        lines = [f"(ep-a2a-{name})=\n## ep-a2a {name}", command.help, table(("option", "meaning"), rows)]
        parts.append("\n\n".join([*lines, f"Also {also}: [as in all commands](#what-all-commands-do-alike)."]))
    return "\n\n".join(parts)


def default_of(field: dataclasses.Field[Any]) -> str:
    """A field's default, as it is written; "" where it is required."""
    if field.default is dataclasses.MISSING:
        return ""
    return f"`{field.default}`" if isinstance(field.default, enum.Enum) else f"`{field.default!r}`"


def config_fields() -> str:
    """The table of EpDispatchCombineConfig's fields."""
    from ep_a2a.config import EpDispatchCombineConfig

    first: dict[str, str] = {}
    rows = []
    for each in dataclasses.fields(EpDispatchCombineConfig):
        meaning = sections(EpDispatchCombineConfig.__doc__)[1].get(each.name, "")
        name = first.setdefault(meaning, each.name)
        shown = meaning if name == each.name else f"As `{name}`."
        rows.append((f"`{each.name}`", each.type, default_of(each), shown))
    return table(("field", "type", "default", "meaning"), rows)


def handle_kwargs() -> str:
    """The kwargs of `manager.get_handle`: the config fields that other names set, then those of equal names."""
    from ep_a2a.config import handle_kwargs as module

    special = {"input_dtype": "data_type, combine_dtype", "quant_dtype": "data_type"}
    fields = module.CONFIG_FIELD_OF_KWARG | special
    named = [*module.REQUIRED_KWARGS, *module.OPTIONAL_KWARGS, *module.EXTRA_KWARGS]
    other = [(f"`{name}`", f"`{fields[name]}`") for name in named if fields.get(name, name) != name]
    lists = [
        f"{kind}: {', '.join(f'`{name}`' for name in names)}."
        for kind, names in (
            ("Required", module.REQUIRED_KWARGS),
            ("Optional", module.OPTIONAL_KWARGS),
            ("This package's own", module.EXTRA_KWARGS),
        )
    ]
    return "\n\n".join([*lists, table(("kwarg", "config field"), other)])


def enumerations() -> str:
    """The enumerations of the configuration and their values."""
    from ep_a2a import config

    parts = []
    for kind in (
        config.Layout,
        config.QuantType,
        config.ScaleFormat,
        config.CompiledCalls,
        config.EpDispatchCombineKernelType,
    ):
        text = inspect.cleandoc(kind.__doc__ or "")
        text = re.sub(r"^(\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
        values = ", ".join(
            f"`{member.value}`" if isinstance(member.value, str) else f"`{member.name}`" for member in kind
        )
        parts.append(f"### {kind.__name__}\n\n{text}\n\nValues: {values}.")
    return "\n\n".join(parts)


def vllm_patches() -> str:
    """The table of what the plugin changes in vLLM."""
    from tests.engines.vllm.contract.patch_registry import PATCHES

    rows = [(p.name, f"`{p.target.removeprefix('vllm.')}`", p.what, p.remove_when) for p in PATCHES]
    return table(("patch", "target in `vllm.`", "what", "until"), rows)


def compat_arguments() -> str:
    """A section for each library of ep_a2a.compat: the parameters that do not act as in the library."""
    from ep_a2a.compat import parameters

    parts = []
    for library, title in (("deep_ep", "DeepEP"), ("mori", "MORI"), ("triton_distributed", "Triton-distributed")):
        rows = [
            (_names(row.callables), _names(row.parameters) or "all", row.when or "any", row.effect, row.text)
            for row in parameters.ROWS
            if row.library == library
        ]
        parts.append(f"## {title}\n\n{table(('callable', 'parameters', 'values', 'effect', 'reason or remedy'), rows)}")
    return "\n\n".join(parts)


def backends() -> str:
    """The tables of what backends can do and need."""
    from ep_a2a.commands.backends import registered_backends
    from ep_a2a.managers.capabilities import TABLES

    parts, found = [], registered_backends()
    for name, title in TABLES.items():
        rows = ([f"`{each.name}`", *each.cells(name).values()] for each in found)
        parts.append(f"## {title}\n\n{table(['backend', *found[0].cells(name)], rows)}")
    return "\n\n".join(parts)


def memory_order() -> str:
    """The table of device functions that order accesses."""
    from tools import order

    return order.table_of(order.path_of(order.PINNED[-1]).read_text(encoding="utf-8"))


def _names(text: str) -> str:
    return ", ".join(f"`{name}`" for name in text.split())


PARTS: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        environment,
        errors,
        commands,
        config_fields,
        handle_kwargs,
        enumerations,
        vllm_patches,
        compat_arguments,
        backends,
        memory_order,
    )
}


def part(name: str) -> str:
    """The generated part of this name; KeyError where there is none."""
    return PARTS[name]()


def read_page(app: Sphinx, name: str, content: list[str]) -> None:
    """Puts generated parts into a page, and leads its links to bench/results to their pages."""
    depth = name.count("/")
    content[0] = MARK.sub(lambda mark: PAGE.sub(r"[\1](\1.md)", part(mark[1])), content[0])
    content[0] = RESULT_LINK.sub(rf"]({'../' * depth}results/runs/\1", content[0])


def copy_results(app: Sphinx) -> None:
    """Makes docs/results/runs anew from bench/results: reports become pages, their other files stay where they are."""
    folder = Path(app.srcdir) / "results" / "runs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in sorted(RESULTS.glob("*.md")):
        text = re.sub(r"\]\((?!http)([\w./-]+\.(?:jsonl?|svg|png))", r"](../../../bench/results/\1", path.read_text())
        (folder / path.name).write_text(re.sub(r"\]\(\.\./\.\./docs/", "](../../", text))


def escape_docstring(app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Escapes what reStructuredText would read as markup: the package's docstrings have none but `code`."""
    lines[:] = [
        "`".join(re.sub(r"([*|\\])", r"\\\1", text) if i % 2 == 0 else text for i, text in enumerate(line.split("`")))
        for line in lines
    ]


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the functions above; docstrings are escaped before napoleon reads them."""
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)
    app.connect("builder-inited", copy_results)
    app.connect("source-read", read_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
