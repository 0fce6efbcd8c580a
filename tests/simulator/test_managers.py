"""Managers of all ranks in one process."""

import torch

from ep_a2a.errors import ConfigError, ConfigMismatchError
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.topology import RankFacts, TopologyReport
from tests.cases.manager_cases import kwargs_of
from tests.simulator.cases import SMALL
from tests.simulator.ranks import Conditions, Context, simulate

WRONG_RANK = 1
LONGEST_SECS = 5.0
"""By the simulated clock; a rank that nobody tells waits for 300 s."""


def ask_for_wrong_kwargs(context: Context) -> BaseException | None:
    """The error of get_handle on this rank, where WRONG_RANK asks for rows of no elements."""
    size = context.group.size
    manager = NativeAll2AllManager(context.group)
    manager.device = torch.device("cpu")
    facts = (RankFacts(hostname="host", boot_id="boot"),) * size
    manager._report = TopologyReport(facts, (("",) * size,) * size)
    changes = {"token_hidden_size": 0} if context.rank == WRONG_RANK else {}
    try:
        manager.get_handle(kwargs_of(SMALL, context.rank, **changes))
    except (ConfigError, ConfigMismatchError) as error:
        return error
    return None


def test_kwargs_that_one_rank_has_wrong_are_told_to_all():
    run = simulate(SMALL.world_size, ask_for_wrong_kwargs, conditions=Conditions())
    assert run.errors == [None] * SMALL.world_size
    for rank, error in enumerate(run.results):
        if rank == WRONG_RANK:
            assert isinstance(error, ConfigError)
        else:
            assert isinstance(error, ConfigMismatchError)
            assert f"rank {WRONG_RANK} failed with" in str(error)
    assert run.machine.scheduler.now - run.machine.scheduler.start_secs < LONGEST_SECS
