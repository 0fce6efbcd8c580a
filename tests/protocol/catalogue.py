"""What is explored: models of the protocols as they are, and mutants that must be caught."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tests.protocol import chunks, rules
from tests.protocol.chunks import ChunkRules, Chunks
from tests.protocol.deaths import DISAGREEMENT, WRONG_NAME, DeathRules, Deaths
from tests.protocol.explorer import Outcome, explore, search
from tests.protocol.intra_node import IntraNode
from tests.protocol.machine import DEADLOCK, OVERWRITTEN, STALE_READ
from tests.protocol.residency import Residency, ResidencyRules
from tests.protocol.rules import Calls, Path, Rules

COUNTED = (Path.COUNTED,)
FLAGGED = (Path.FLAGGED,)
TO_NEXT_OR_NOBODY = ((), (1,))
TO_ALL_OR_NOBODY = ((), (1, 2))


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: what it is; for a mutant, what has been changed.
        rules: what is explored.
        caught_as: how what goes wrong begins, None where nothing may go wrong.
    """

    name: str
    rules: Rules | ChunkRules | DeathRules | ResidencyRules
    caught_as: str | None = None

    @functools.cached_property
    def outcome(self) -> Outcome:
        """What exploring it has shown; explored once per process."""
        if isinstance(self.rules, DeathRules):
            return search(Deaths(self.rules))
        return explore(MODELS[type(self.rules)](self.rules))


MODELS: dict[type, Any] = {Rules: IntraNode, ChunkRules: Chunks, ResidencyRules: Residency}

# A protocol that the product does not have: flagged words with two parities, and a combine that waits for nobody.
TWO_PARITIES: dict[str, Any] = {"paths": FLAGGED, "num_copies": 2, "combine_waits": False}
THREE: dict[str, Any] = {"num_ranks": 3, "is_reduced": True, "pads": False}
# The order in which 2 and 3 programs serve 4 channels when each program runs to its end before the next one begins.
TWO_PROGRAMS, THREE_PROGRAMS = (0, 2, 1, 3), (0, 3, 1, 2)

RIGHT = (
    Case("IntraNode, both dispatches in any order", Rules()),
    Case("the same, epochs that change sign", Rules(first_epoch=3, is_reduced=True)),
    Case("the same, layout compact", Rules(compact=True)),
    Case("the same, combine with weights", Rules(weights=True)),
    Case("the same, whole calls and halves mixed, own rows too", Rules(calls=tuple(Calls), is_reduced=True)),
    Case("the same, two ops of one index in turn", Rules(num_ops=2)),
    Case("low-latency dispatch, rows that contain EMPTY", Rules(paths=FLAGGED, written_in_full=True)),
    Case(
        "flags with ORDERS only, launches that end before their stores have drained",
        Rules(paths=COUNTED, weights=True, launches_drain=False),
    ),
    Case("3 ranks, both dispatches in any order", Rules(**THREE, routes=TO_NEXT_OR_NOBODY)),
    Case("3 ranks, layout compact", Rules(**THREE, routes=TO_NEXT_OR_NOBODY, compact=True)),
    Case("3 ranks, low-latency dispatch", Rules(**THREE, routes=TO_ALL_OR_NOBODY, paths=FLAGGED)),
    Case("two parities of flagged words, a combine that does not wait for flags", Rules(**TWO_PARITIES)),
    Case("rings, 1 slot", ChunkRules()),
    Case("rings, 2 slots, up to 3 chunks", ChunkRules(num_slots=2, max_chunks=3, is_reduced=True)),
    Case("rings, 3 nodes, 1 slot", ChunkRules(num_ranks=3, max_chunks=1, is_reduced=True)),
    Case(
        "rings, 4 channels of 2 programs that run one after the other, as in the interpreter",
        ChunkRules(channels=(TWO_PROGRAMS, TWO_PROGRAMS), max_chunks=1),
    ),
    Case("one rank dies at any point", DeathRules()),
    Case("two ranks die at any point", DeathRules(num_deaths=2)),
    Case("two of four ranks die at any point", DeathRules(num_deaths=2, num_ranks=4)),
    Case("one GPU, launches that follow one another", ResidencyRules(is_dependent=False)),
    Case("one GPU, dependent launches", ResidencyRules()),
    Case("one GPU, dependent launches of 3 ranks", ResidencyRules(num_ranks=3, num_programs=1)),
)

HARMLESS = (
    Case("IntraNode, flags compared by `!=`", Rules(late=rules.differs)),
    Case("IntraNode, a low-latency dispatch that does not wait for its flags", Rules(poster_waits=False)),
)

MUTANTS = (
    Case("combine does not wait for flags", Rules(combine_waits=False), OVERWRITTEN),
    Case(
        "combine does not wait for flags, counts in two copies",
        Rules(combine_waits=False, num_copies=2, paths=COUNTED),
        f"{OVERWRITTEN}: TOKENS",
    ),
    Case("combine waits for ranks with which rows are exchanged", Rules(waits_for_all=False), OVERWRITTEN),
    Case(
        "combine waits for ranks with which rows are exchanged, 3 ranks",
        Rules(**THREE, routes=TO_NEXT_OR_NOBODY, waits_for_all=False),
        OVERWRITTEN,
    ),
    Case("combine's flag is posted before the experts have read", Rules(flag_behind_experts=False), OVERWRITTEN),
    Case("bulk dispatch does not wait for flags", Rules(paths=COUNTED, dispatch_waits=False), STALE_READ),
    Case("flags compared by `<`", Rules(first_epoch=3, late=rules.plainly_less), STALE_READ),
    Case("two parities, flags compared by `!=`", Rules(**TWO_PARITIES, late=rules.differs), DEADLOCK),
    Case("one parity where combine does not wait for flags", Rules(**TWO_PARITIES | {"num_copies": 1}), OVERWRITTEN),
    Case("no release before dispatch's flags", Rules(paths=COUNTED, releases=False), f"{STALE_READ}: COUNTS"),
    Case(
        "no release before dispatch's flags, layout compact",
        Rules(paths=COUNTED, compact=True, releases=False),
        f"{STALE_READ}: TOKENS",
    ),
    Case(
        "no release before combine's flags",
        Rules(paths=FLAGGED, weights=True, releases=False),
        f"{STALE_READ}: WEIGHT_EPOCHS",
    ),
    Case(
        "no release behind a row that contains EMPTY",
        Rules(paths=FLAGGED, written_in_full=True, releases=False),
        f"{STALE_READ}: LOW_LATENCY_ROWS",
    ),
    Case(
        "staging of a bulk dispatch in the low-latency rows",
        Rules(shared_staging=True),
        f"{STALE_READ}: LOW_LATENCY_ROWS",
    ),
    Case("flagged words accepted whatever their epoch", Rules(tags_are_compared=False), STALE_READ),
    Case("readers do not leave EMPTY", Rules(readers_empty=False), STALE_READ),
    Case("relaxed flags, launches that end before their stores have drained", Rules(launches_drain=False), OVERWRITTEN),
    Case("rings: one slot too many", ChunkRules(extra_slots=1), OVERWRITTEN),
    Case("rings: one slot too many, of 2", ChunkRules(num_slots=2, max_chunks=3, extra_slots=1), OVERWRITTEN),
    Case("rings: a slot is given back before the chunk is read", ChunkRules(taken_first=True), OVERWRITTEN),
    Case("rings: no release before the arrival is posted", ChunkRules(releases=False), STALE_READ),
    Case("rings: arrivals compared by `!=`", ChunkRules(num_slots=2, arrived_behind=chunks.differs), DEADLOCK),
    Case("rings: arrivals compared by `<`", ChunkRules(arrived_behind=chunks.plainly_less), STALE_READ),
    Case("rings: what was taken compared by `<`", ChunkRules(taken_behind=chunks.plainly_less), OVERWRITTEN),
    Case("rings: roles that wait instead of taking turns", ChunkRules(blocking=True), DEADLOCK),
    Case(
        "rings: the same 4 channels, one rank with 2 and one with 3 programs",
        ChunkRules(channels=(TWO_PROGRAMS, THREE_PROGRAMS), max_chunks=1),
        DEADLOCK,
    ),
    Case(
        "a death: survivors name whom the first kernel to give up accuses", DeathRules(by_agreement=False), WRONG_NAME
    ),
    Case(
        "two deaths: the last verdict counts", DeathRules(num_deaths=2, num_ranks=4, first_counts=False), DISAGREEMENT
    ),
    Case("one GPU: dependent launches that begin before waits have ended", ResidencyRules(is_early=True), DEADLOCK),
    Case("one GPU: more programs than places", ResidencyRules(spare_places=-1), DEADLOCK),
)
