"""Bodies of the tests of `ep_a2a.survivors`: ranks die at once, the others go on with a manager of their own."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ep_a2a import survivors
from ep_a2a.errors import RankTimeoutError
from ep_a2a.managers.registry import create_manager
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.subgroups import make_subgroup
from ep_a2a.parallel.survivors import Survivors
from ep_a2a.testing import RankContext
from tests.cases.fault_cases import TIMEOUT_SECS, settled_step, store_of, timed
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case, run_step
from tests.cases.op_checks import raised

NO_STORE_SECS = 20.0
"""Bound for the error that a store has ended, far below that of a meeting."""


def experts_of_ranks(case: Case) -> list[list[int]]:
    """Two places on each rank: an expert of its own, and the one of the next rank."""
    return [[rank, (rank + 1) % case.world_size] for rank in range(case.world_size)]


def die_and_go_on(context: RankContext, case: Case, victims: list[int], store_dies: bool, folder: str) -> None:
    """`victims` kill themselves in one step; the others write down what they saw, since a pool with dead ranks fails.

    Args:
        store_dies: the first victim holds the group's store, so that the others meet in one of their own.
    """
    group = context.group
    if store_dies:
        store = store_of(context.rank == victims[0], Path(folder, "first store"))
        group = make_subgroup(context.group, range(context.world_size), store=store)
    manager = create_manager("ep_a2a", group)
    op = manager.get_handle(kwargs_of(case, context.rank))
    run_step(case, op, 0, context.device)
    op.set_timeout(TIMEOUT_SECS)
    Rendezvous(context.group).barrier("before the kills")
    if context.rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(RankTimeoutError, lambda: settled_step(case, op, 1))
    seen: dict[str, Any] = {"missing": error.missing_ranks, "late": error.late_ranks}
    first_left = min(set(range(case.world_size)) - set(victims))
    own = None
    if store_dies:
        seen["no_store_secs"] = timed(lambda: refused_without_a_store(case, error, manager))
        own = store_of(context.rank == first_left, Path(folder, "second store"))
    left = survivors(error, manager, experts_of_ranks(case), store=own)
    seen |= {"ranks": left.ranks, "rank": left.manager.rank, "experts": left.experts, "lost": left.lost_experts}
    seen["destroy_secs"] = timed(manager.destroy)
    go_on(context, case, left)
    Path(folder, f"{context.rank}.json").write_text(json.dumps(seen))


def refused_without_a_store(case: Case, error: RankTimeoutError, manager: Any) -> None:
    """The former group's store has ended with its process: the error says so."""
    raised(RankTimeoutError, lambda: survivors(error, manager, experts_of_ranks(case)), "the store of")


def go_on(context: RankContext, case: Case, left: Survivors, num_nodes: int = 1, **changes: Any) -> None:
    """Steps of the new manager's op, against the oracle; num_nodes: of those who are left."""
    num_left = len(left.ranks)
    smaller = replace(case, world_size=num_left, num_experts=len(left.experts), num_nodes=num_nodes)
    op = left.manager.get_handle(kwargs_of(smaller, left.manager.rank, **changes))
    for number in range(2):
        run_step(smaller, op, number, context.device)
    op.check()
    left.manager.destroy()
    # the process of the store must be the last to go
    dist.barrier(left.group)
