"""Finds the family of a model in a table of how vLLM's model files size MoE layers."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

TABLE = "families.toml"
"""Written by tools/moe_families.py."""
EXPERT_DTYPE_KEY = "expert_dtype"


@dataclass(frozen=True)
class Family:
    """How vLLM sizes the MoE layers of some architectures.

    Attributes:
        hidden, experts, topk: keys of config.json; the first that holds a number above 0 counts. A dot leads into a
            nested object.
        shares_tokens: tensor-parallel ranks of several replicas each bring a part of their replica's tokens.
        expert_dtype: the experts' dtype where config.json does not name it by `expert_dtype`; None: the family knows
            no such key, and its experts have the dtype of the quantisation.
    """

    hidden: tuple[str, ...]
    experts: tuple[str, ...]
    topk: tuple[str, ...]
    shares_tokens: bool = False
    expert_dtype: str | None = None


@dataclass(frozen=True)
class Table:
    """Families as the model files of one vLLM release say.

    Attributes:
        release: version of vLLM. date: day of the reading.
        architectures: the family of each architecture with MoE layers.
        usual: a guess for other models: the keys of all families, rare ones first.
    """

    release: str
    date: str
    architectures: dict[str, Family]
    usual: Family


@cache
def table() -> Table:
    """Returns this package's table."""
    values = tomllib.loads(resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))
    architectures = {name: _family(row) for row in values["family"] for name in row.pop("architectures")}
    return Table(values["vllm"], values["date"].isoformat(), architectures, _family(values["usual"]))


def _family(row: dict[str, Any]) -> Family:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Family(**fields)


def find_family(architectures: Sequence[str], model_types: Sequence[str]) -> Family | None:
    """Returns a model's family, None where the table has none.

    Args:
        architectures: of config.json, the whole model's first.
        model_types: of config.json, the whole model's first; they count where no architecture is known.
    """
    known = table().architectures
    by_architecture = (known[name] for name in architectures if name in known)
    by_model_type = (found for name in model_types if (found := _of_model_type(name)))
    return next(by_architecture, None) or next(by_model_type, None)


def _of_model_type(model_type: str) -> Family | None:
    """Returns the only family of the architectures with this model's name, or that begin with it."""
    name = _plain(model_type)
    language_model = name.removesuffix("text")
    by_name: dict[str, set[Family]] = {}
    for architecture, family in table().architectures.items():
        by_name.setdefault(_plain(re.sub("For[A-Z].*", "", architecture)), set()).add(family)
    beginnings = (families for begin, families in by_name.items() if begin.startswith(language_model))
    found = by_name.get(name) or by_name.get(language_model) or set().union(*beginnings)
    return found.pop() if len(found) == 1 and name else None


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
