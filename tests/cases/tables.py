"""Tables of cases as data: tests/cases/*.json."""

import json
from pathlib import Path
from typing import Any

import torch


def read_json(name: str) -> Any:
    """The table of a name as it is."""
    return json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))


def read_table(name: str) -> Any:
    """The table of a name; its arrays become tuples, and "torch.bfloat16" a dtype."""
    return _value(read_json(name))


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_value, value))
    if isinstance(value, dict):
        return {name: _value(each) for name, each in value.items()}
    named = getattr(torch, value.removeprefix("torch."), None) if str(value).startswith("torch.") else None
    return named if isinstance(named, torch.dtype) else value
