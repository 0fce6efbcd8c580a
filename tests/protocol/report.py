"""The tables of docs/protocol.md."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.protocol.catalogue import HARMLESS, MUTANTS, RIGHT, Case

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = "rings: a slot is given back before the chunk is read"


def models(cases: tuple[Case, ...]) -> str:
    """What was explored, and how many states there are."""
    lines = ["| model | ranks | steps | explored | states |", "|---|---|---|---|---|"]
    for case in cases:
        rules = case.rules
        explored = "reduced" if rules.is_reduced else "in full"
        lines.append(
            f"| {case.name} | {rules.num_ranks} | {rules.num_steps} | {explored} | {case.outcome.num_states} |"
        )
    return "\n".join(lines)


def mutants() -> str:
    """What was caught, how, and after how many steps of a shortest way there."""
    lines = ["| mutant | ranks | caught as | states until then | lines of the trace |", "|---|---|---|---|---|"]
    for case in MUTANTS:
        outcome = case.outcome
        caught = re.sub(r": (\w+).*", r", `\1`", outcome.violation or "nothing")
        lines.append(
            f"| {case.name} | {case.rules.num_ranks} | {caught} | {outcome.num_states} | {len(outcome.trace)} |"
        )
    return "\n".join(lines)


def example() -> str:
    """The shortest counterexample of one mutant."""
    case = next(case for case in MUTANTS if case.name == EXAMPLE)
    return f"```\n{case.outcome}\n```"


PARTS: dict[str, Callable[[], str]] = {
    "models": lambda: models(RIGHT),
    "harmless": lambda: models(HARMLESS),
    "mutants": mutants,
    "example": example,
}


def updated(document: str) -> str:
    """The document with its generated parts made anew."""
    for name, make in PARTS.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        found = marks.search(document)
        assert found, f"the document has no place for {name}"
        document = f"{document[: found.start()]}{found[1]}{make()}\n{found[2]}{document[found.end() :]}"
    return document
