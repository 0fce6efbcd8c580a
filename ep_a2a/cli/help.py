"""Describes options as --help and docs/cli.md list them: names, what they take, defaults. No line is cut."""

from __future__ import annotations

import enum
import inspect
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.models import OptionInfo

if TYPE_CHECKING:
    from collections.abc import Callable


def options_of(command: Callable[..., Any]) -> dict[str, dict[str, tuple[str, str, str]]]:
    """Returns, by panel and parameter, an option's names and value, its default and its help, from a signature."""
    hints = typing.get_type_hints(command, include_extras=True)
    panels: dict[str, dict[str, tuple[str, str, str]]] = {}
    for each in inspect.signature(command).parameters.values():
        if typing.get_origin(hints.get(each.name)) is typing.Annotated:
            info = typing.get_args(hints[each.name])[1]
            if not getattr(info, "hidden", False):
                usual = "Options" if isinstance(info, OptionInfo) else "Arguments"
                panel = getattr(info, "rich_help_panel", None) or usual
                panels.setdefault(panel, {})[each.name] = option_row(each.name, hints[each.name], each.default)
    return panels


def option_row(name: str, hint: Any, default: Any) -> tuple[str, str, str]:
    """Returns an option's names and what it takes, its default ("" for none), its help."""
    kind, info = typing.get_args(hint)[:2]
    if isinstance(default, type(info)):  # `name: int = typer.Option(1)`
        default = default.default
    # In Annotated[..., typer.Option("--json")] the first name is the parameter that typer calls default.
    given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    if not isinstance(info, OptionInfo):
        return info.metavar or name.upper(), "", info.help or ""
    plain = f"--{name.replace('_', '-')}"
    names = [each for each in given if each.startswith("-")] or [
        plain,
        *[f"--no-{plain[2:]}"] * (type_name(kind) == ""),
    ]
    shown = " ".join(filter(None, (", ".join(names), info.metavar or type_name(kind))))
    value = default.value if isinstance(default, enum.Enum) else default
    blank = value is None or value is False or value is inspect.Parameter.empty
    return shown, "" if blank else str(value), info.help or ""


def type_name(kind: Any) -> str:
    """Returns what an option takes: "" for a flag."""
    choices = [each for each in typing.get_args(kind) if each is not type(None)]
    if choices:
        return type_name(choices[0])
    if kind is bool:
        return ""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}.get(kind, getattr(kind, "__name__", str(kind)))
