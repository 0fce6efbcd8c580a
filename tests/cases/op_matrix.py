"""The cases of the op that the simulator and GPUs both run. covering.py has those that pair routings with all else."""

from collections.abc import Collection
from dataclasses import replace

from ep_a2a.config import LOW_LATENCY_MAX_TOKENS
from ep_a2a.policy import MAX_COUNTED_ALONE
from tests.cases.op_cases import Case
from tests.cases.tables import read_table

_GROUPS = read_table("op_matrix")
UNEVEN = ((8, 5, 0, 3), (0, 9, 1, 2), (2, 3, 8, 0))


def listed(group: str) -> dict[str, Case]:
    """The cases of a group of op_matrix.json: each says what differs from the case without a name, the first one."""
    base = Case(**_GROUPS[group][""])
    return {name: replace(base, **fields) for name, fields in _GROUPS[group].items() if name}


def _worlds() -> dict[str, Case]:
    base = Case(tokens=UNEVEN, num_steps=3, hidden_dim=40, topk=2)
    return {
        f"W{world_size}-{layout}": replace(base, world_size=world_size, num_experts=2 * world_size + 1, layout=layout)
        for world_size in (5, 6)
        for layout in ("compact", "rank_major")
    }


def _look_back() -> dict[str, Case]:
    """Steps that allow so many tokens that programs learn counts from the programs before them, and have few."""
    base = Case(
        world_size=3,
        num_experts=7,
        topk=3,
        hidden_dim=8,
        max_tokens=MAX_COUNTED_ALONE + 77,
        num_steps=3,
        tokens=((7, 0, 13), (1, 20, 2), (16, 4, 0)),
    )
    return {
        f"look_back-{name}": replace(base, **changes)
        for name, changes in {
            "compact": {"routing": "zipf"},
            "rank_major": {"routing": "some_dropped", "layout": "rank_major", "split": "mixed"},
            "expert_major": {"routing": "out_of_range", "layout": "expert_major"},
            "all_to_one": {"routing": "all_to_one", "layout": "rank_major", "num_steps": 2},
            "one-step-less": {"step_tokens": (MAX_COUNTED_ALONE + 1, MAX_COUNTED_ALONE, None)},
            "epoch-2**32": {"first_epoch": 2**32 - 3, "world_size": 2},
            # a program's own tokens are more than it looks at at once
            "many-tokens": {"tokens": ((200, 9),), "world_size": 2, "topk": 2, "num_steps": 1},
        }.items()
    }


def _three_dispatches() -> dict[str, Case]:
    """Steps that are flagged, of which each program counts all ids, and that look back, in turn, of one op."""
    base = Case(
        world_size=2,
        num_experts=5,
        hidden_dim=8,
        max_tokens=MAX_COUNTED_ALONE + 77,
        num_steps=8,
        pad_id=-2,
        tokens=((9, 4), (0, 7), (16, 3), (1, 1), (5, 0)),
        step_tokens=(
            LOW_LATENCY_MAX_TOKENS,
            LOW_LATENCY_MAX_TOKENS + 1,
            None,
            20,
            MAX_COUNTED_ALONE + 1,
            MAX_COUNTED_ALONE,
            16,
        ),
    )
    return {
        "three_dispatches-compact": replace(base, routing="zipf"),
        "three_dispatches-rank_major": replace(
            base, routing="out_of_range", layout="rank_major", unusual=True, split="mixed"
        ),
    }


def _counted_alone() -> dict[str, Case]:
    """Steps of more tokens than a program looks at at once, where it counts all of those before its own."""
    base = Case(world_size=2, num_experts=5, hidden_dim=8, max_tokens=400, tokens=((390, 257),), num_steps=1)
    return {"alone-many-tokens": replace(base, routing="some_dropped")}


def _direct(cases: dict[str, Case]) -> dict[str, Case]:
    """The same by direct writes, for steps that would otherwise be flagged."""
    never = {"flagged_max_tokens": 0}
    return {
        f"{name}-direct": replace(case, options=case.options | never)
        for name, case in cases.items()
        if case.max_tokens <= LOW_LATENCY_MAX_TOKENS and name != "fifty-steps"
    }


SHAPES, DTYPES, CASTS, CONTRACTS = map(listed, ("shapes", "dtypes", "casts", "contracts"))
UNUSUAL, HALVES = map(listed, ("unusual", "halves"))
PACKED = listed("packed")
DIRECT = _direct(CONTRACTS | DTYPES | CASTS | _worlds() | HALVES | UNUSUAL | PACKED)
# What differs from the flagged way in payload only, which both ways share: enough on GPUs, where it takes no time.
DIRECT_PAYLOADS = _direct(DTYPES | CASTS | _worlds() | UNUSUAL).keys()

CASES: dict[str, Case] = (
    listed("expert_major")
    | CONTRACTS
    | DTYPES
    | CASTS
    | SHAPES
    | _worlds()
    | listed("combine_quants")
    | UNUSUAL
    | HALVES
    | listed("both_dispatches")
    | PACKED
    | _look_back()
    | _three_dispatches()
    | _counted_alone()
    | DIRECT
)


def by_world_size(*, left_out: Collection[str] = ()) -> list[tuple[str, Case]]:
    """All cases but some, those of one world size together, so that one pool of processes serves them."""
    chosen = [(name, case) for name, case in CASES.items() if name not in left_out]
    return sorted(chosen, key=lambda item: item[1].world_size)
