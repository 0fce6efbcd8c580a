"""The real kernels on other schedules: interpreted ranks pause at random points, and every step meets the oracle.

`python -m tests.programs.schedules --steps 1000` runs many; tests/multiprocess/test_schedules.py a few.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from triton.runtime.interpreter import interpreter_builder

from ep_a2a.memory.arena import Arena
from ep_a2a.testing import RankPool
from tests.cases.op_cases import Case, make_op, run_step, set_first_epoch
from tests.cases.op_matrix import UNEVEN
from tests.cases.ring_cases import SMALL_RINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.testing import RankContext

OPERATIONS = (
    "create_load",
    "create_store",
    "create_masked_load",
    "create_masked_store",
    "create_atomic_cas",
    "create_atomic_rmw",
)
"""What the interpreter calls for each access to memory."""
PAUSE_PROBABILITY = 0.01
SHORT_SECS, LONG_SECS, LONG_SHARE = 0.001, 0.02, 0.1
SMALL = Case(
    world_size=3,
    hidden_dim=16,
    topk=3,
    num_experts=7,
    max_tokens=6,
    routing="out_of_range",
    layout="rank_major",
    tokens=((6, 2, 0), (1, 5, 6), (0, 0, 3), (4, 4, 4)),
)
# steps of at most 3 tokens are flagged, the others not: the path changes from step to step
SWITCHING = replace(
    SMALL,
    max_num_tokens=(None, 3, 6, 2),
    tokens=((6, 2, 0), (1, 3, 2), (0, 5, 3), (2, 0, 2)),
    options={"flagged_max_tokens": 3},
)
BETWEEN_NODES = Case(
    world_size=4,
    num_nodes=2,
    hidden_dim=16,
    topk=3,
    num_experts=9,
    tokens=UNEVEN,
    routing="out_of_range",
    layout="rank_major",
    options=SMALL_RINGS,
)
SCHEDULES: dict[str, Case] = {
    "flagged": SMALL,
    "flags": replace(SMALL, layout="compact", options={"flagged_max_tokens": 0}),
    "switching": SWITCHING,
    "switching-halves": replace(SWITCHING, split="mixed"),
    "expert-major": replace(SMALL, layout="expert_major"),
    "epoch-2**32": replace(SWITCHING, first_epoch=2**32 - 3),
    "rings": BETWEEN_NODES,
    "rings-compact-halves": replace(BETWEEN_NODES, layout="compact", split="mixed"),
    "rings-of-a-step": replace(BETWEEN_NODES, kernel="InterNodeV1LL", options={}),
}


@contextmanager
def random_pauses(seed: int) -> Iterator[list[int]]:
    """Interpreted kernels of this process pause now and then before an access to memory; yields how often, [count]."""
    draws, count = random.Random(seed), [0]

    def pausing(operation: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if draws.random() < PAUSE_PROBABILITY:
                count[0] += 1
                time.sleep(draws.random() * (LONG_SECS if draws.random() < LONG_SHARE else SHORT_SECS))
            return operation(*args, **kwargs)

        return run

    for name in OPERATIONS:
        setattr(interpreter_builder, name, pausing(getattr(interpreter_builder, name)))
    try:
        yield count
    finally:
        for name in OPERATIONS:
            delattr(interpreter_builder, name)


def run_with_pauses(context: RankContext, case: Case, num_steps: int, seed: int) -> int:
    """Steps of the case against the oracle; the pauses that this rank made."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        set_first_epoch(op, case, arena)
        with random_pauses(seed * case.world_size + context.rank) as count:
            for number in range(num_steps):
                run_step(case, op, number, context.device)
            op.check()
        return count[0]


def command(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each schedule.")] = 100,
    seed: Annotated[int, typer.Option(help="Of pauses and inputs.")] = 1,
    names: Annotated[str, typer.Option(help="Schedules, separated by commas; default: all.")] = ",".join(SCHEDULES),
) -> None:
    """Runs schedules and prints a line for each: steps that met the oracle, pauses of all ranks, seconds."""
    for name in names.split(","):
        case, start = replace(SCHEDULES[name], seed=seed), time.monotonic()
        with RankPool(case.world_size, timeout_secs=24 * 3600) as pool:
            pauses = sum(pool.run(run_with_pauses, case, steps, seed))
        typer.echo(f"| {name} | {steps} | {pauses} | {time.monotonic() - start:.0f} |")


if __name__ == "__main__":
    typer.run(command)
