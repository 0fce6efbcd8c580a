"""Finds the family of a model: in the model files of an installed vLLM, else in this package's table of them."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.plan.model_files import Family, ModelFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TABLE = "families.toml"
"""Written by tools/moe_families.py."""


@dataclass(frozen=True)
class Table:
    """Families as the model files of one vLLM release say.

    Attributes:
        release: version of vLLM. date: day of the reading.
        architectures: the family of each architecture with MoE layers.
    """

    release: str
    date: str
    architectures: dict[str, Family]

    def family(self, architecture: str) -> Family | None:
        """Returns an architecture's family, None where the table has none."""
        return self.architectures.get(architecture)

    @property
    def usual(self) -> Family:
        """A guess for other models: the keys of all families, rare ones first; no rank shares tokens with others."""
        families = list(dict.fromkeys(self.architectures.values()))

        def keys(name: str) -> tuple[str, ...]:
            counted = Counter(key for family in families for key in getattr(family, name))
            return tuple(sorted(counted, key=counted.__getitem__))

        return Family(keys("hidden"), keys("experts"), keys("topk"), shares_tokens=False, expert_dtype=None)


@cache
def table() -> Table:
    """Returns this package's table."""
    values = tomllib.loads(resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8"))
    found = {name: _family(row) for row in values["family"] for name in row["architectures"]}
    return Table(values["vllm"], values["date"].isoformat(), found)


def _family(row: dict[str, Any]) -> Family:
    hidden, experts, topk = (tuple(row[name]) for name in ("hidden", "experts", "topk"))
    return Family(hidden, experts, topk, row["shares_tokens"], row.get("expert_dtype"))


def installed_vllm() -> ModelFiles | None:
    """Returns the model files of the vLLM that Python would import, None where there is none. Imports nothing."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:
        return None
    places = (spec and spec.submodule_search_locations) or ()
    return next((files for place in places if (files := ModelFiles(Path(place))).architectures), None)


def find_family(
    architectures: Sequence[str], model_types: Sequence[str], files: ModelFiles | None
) -> tuple[Family | None, str]:
    """Returns a model's family, and whose model files say so.

    Args:
        architectures: of config.json, the whole model's first.
        model_types: of config.json, the whole model's first; they count where no architecture is known.
        files: an installed vLLM's. It may be too old for the model: the table is asked for a name before the next name.
    """
    known = table()
    sources: list[tuple[ModelFiles | Table, str]] = [(known, f"vLLM {known.release} (read on {known.date})")]
    if files is not None:
        sources.insert(0, (files, "the installed vLLM"))
    for names, find in ((architectures, _by_architecture), (model_types, _by_model_type)):
        for name in names:
            for source, its_name in sources:
                if found := find(name, source):
                    return found, its_name
    return None, ""


def _by_architecture(name: str, source: ModelFiles | Table) -> Family | None:
    return source.family(name)


def _by_model_type(model_type: str, source: ModelFiles | Table) -> Family | None:
    """Returns the only family of the architectures with this model's name, or that begin with it."""
    name = _plain(model_type)
    by_name: dict[str, list[str]] = {}
    for architecture in source.architectures:
        by_name.setdefault(_plain(re.sub("For[A-Z].*", "", architecture)), []).append(architecture)
    language_model = name.removesuffix("text")
    beginnings: Iterable[str] = (
        each for begin, all_ in by_name.items() if begin.startswith(language_model) for each in all_
    )
    candidates = by_name.get(name) or by_name.get(language_model) or beginnings
    found = {family for each in candidates if (family := source.family(each))}
    return found.pop() if len(found) == 1 and name else None


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
