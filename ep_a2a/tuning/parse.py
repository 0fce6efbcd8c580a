"""Reads a tuned table strictly: a misspelt or impossible number is an error, not another launch."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import ConfigError, shown
from ep_a2a.whole_files import read_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REMEDY = "Correct the file, or delete it and write it anew with `ep-a2a tune`."
MAX_PROGRAMS = 1 << 16
MAX_WARPS = 32
MIN_ELEMENTS, MAX_ELEMENTS = 128, 1 << 16
MAX_PAUSE_NS = 1_000_000
LARGEST = 1e30
"""Bound of measured figures: unbounded integers would not fit a float."""

_WITH_ROLES = ("num_warps", "num_senders", "num_receivers")
LAUNCH_FIELDS = {
    "bulk_dispatch": ("num_warps", "num_programs"),
    "low_latency_dispatch": _WITH_ROLES,
    "combine": (*_WITH_ROLES, "send_elements", "add_elements", "pause_ns", "send_rows"),
}
"""Fields of a launch, by phase."""
OPTIONAL_FIELDS = ("send_rows",)
"""Those that a file may leave out."""
PROGRAM_FIELDS = ("num_programs", "num_senders", "num_receivers")
"""Those that count programs; 0 stands for one for each unit of work."""

Parts = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def parse_table(path: Path, phase: str) -> list[Parts]:
    """Returns key, launch and evidence of each entry of the table in a file, checked.

    Raises:
        ConfigError: the file cannot be read, or is no table of this phase.
    """
    parse = functools.partial(json.loads, object_pairs_hook=_without_duplicates)
    content = read_file(path, "a readable JSON file", REMEDY, parse)
    _fields(content, {"about": _text, "entries": _list}, str(path))
    entries = [_entry(entry, phase, f"entry {n} of {path}") for n, entry in enumerate(content["entries"])]
    seen: list[dict[str, Any]] = []
    for number, (key, _, _) in enumerate(entries):
        if key in seen:
            raise ConfigError(f"one entry per key in {path}", f"entry {number} again for {key}", REMEDY)
        seen.append(key)
    return entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file; JSON itself lets the last of several equal fields win."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return fields


def _entry(entry: Any, phase: str, where: str) -> Parts:
    _fields(entry, {"key": _object, "launch": _object, "evidence": _object}, where)
    positive = _integer(1, 1 << 31)
    key_fields = {"hidden_dim": positive, "topk": positive, "cast": _text, "max_num_tokens": positive}
    _fields(entry["key"], key_fields, f"key of {where}", {"max_sms": _integer(0, MAX_PROGRAMS)})
    launch = {name: _LAUNCH_CHECKS[name] for name in LAUNCH_FIELDS[phase]}
    optional = {name: launch.pop(name) for name in OPTIONAL_FIELDS if name in launch}
    _fields(entry["launch"], launch, f"launch of {where}", optional)
    evidence_fields = {
        "us": _number,
        "gb_per_s": _number,
        "remote_rows": _integer(0, 1 << 31),
        "device": _text,
        "versions": _texts,
        "date": _text,
    }
    _fields(entry["evidence"], evidence_fields, f"evidence of {where}", {"note": _text})
    return entry["key"], entry["launch"], entry["evidence"]


Check = tuple[str, "Callable[[Any], bool]"]


def _fields(value: Any, required: dict[str, Check], where: str, optional: dict[str, Check] | None = None) -> None:
    """Raises where `value` is not an object with these fields and no others."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} to be an object", shown(value), REMEDY)
    known = required | (optional or {})
    for name in value:
        if name not in known:
            raise ConfigError(f"only the fields {', '.join(known)} in {where}", shown(name), REMEDY)
    for name, (expected, check) in known.items():
        if name not in value and name in required:
            raise ConfigError(f"{name} in {where}", "nothing", REMEDY)
        if name in value and not check(value[name]):
            raise ConfigError(f"{name} in {where} to be {expected}", shown(value[name]), REMEDY)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(least: int, most: int) -> Check:
    return f"an integer from {least} to {most}", lambda value: _is_integer(value) and least <= value <= most


def _power_of_two(least: int, most: int) -> Check:
    return (
        f"a power of two from {least} to {most}",
        lambda value: _is_integer(value) and least <= value <= most and value & (value - 1) == 0,
    )


def _is_measured(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST


_object: Check = ("an object", lambda value: isinstance(value, dict))
_list: Check = ("a list", lambda value: isinstance(value, list))
_text: Check = ("text", lambda value: isinstance(value, str) and bool(value))
_texts: Check = (
    "an object of text",
    lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
)
_number: Check = ("a finite number >= 0", _is_measured)
_LAUNCH_CHECKS: dict[str, Check] = {
    "num_warps": _power_of_two(1, MAX_WARPS),
    "num_programs": _integer(0, MAX_PROGRAMS),
    "num_senders": _integer(0, MAX_PROGRAMS),
    "num_receivers": _integer(0, MAX_PROGRAMS),
    "send_elements": _power_of_two(MIN_ELEMENTS, MAX_ELEMENTS),
    "add_elements": _power_of_two(MIN_ELEMENTS, MAX_ELEMENTS),
    "pause_ns": _integer(0, MAX_PAUSE_NS),
    "send_rows": _power_of_two(1, MAX_WARPS),
}
