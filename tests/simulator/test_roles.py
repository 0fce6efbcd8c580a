"""What rings between nodes do when they are full, when a node is slow, and when their counts wrap (docs/roles.md)."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ep_a2a.kernels.layout import Region
from ep_a2a.kernels.portable import PortableFunction
from tests.cases.op_cases import Case, built_op, run_case, run_step
from tests.cases.ring_cases import rings
from tests.simulator.cases import TWO_NODES
from tests.simulator.ranks import Conditions, Context
from tests.simulator.runs import PAUSE_SECS, TIMEOUT_SECS, run_on_ranks
from tests.simulator.scheduler import Fault

pytestmark = pytest.mark.full

# up to nine chunks of one token go through rings of two
NARROW = replace(
    TWO_NODES,
    max_tokens=9,
    tokens=((9, 0, 7, 2), (1, 8, 0, 9)),
    num_steps=2,
    options=rings(1, 2, 1) | {"timeout_secs": TIMEOUT_SECS},
)
SLOW_NODE = (2, 3)


def turned_away(case: Case, conditions: Conditions) -> Counter[str]:
    """How often a chunk had to wait for room, by the function that would have sent it; values meet the oracle."""
    waited: Counter[str] = Counter()
    call = PortableFunction.__call__

    def counted(self: PortableFunction, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        if self.__name__ in ("send_chunk", "return_chunk") and not bool(result.handle.data.all()):
            waited[self.__name__] += 1
        return result

    with mock.patch.object(PortableFunction, "__call__", counted):
        run_on_ranks(run_case, case.world_size, case, conditions=conditions)
    return waited


@pytest.mark.parametrize("landing", ["newest", "oldest"])
def test_a_full_ring_holds_its_sender_back(landing: str) -> None:
    conditions = Conditions(landing=landing, num_sms=4)
    assert turned_away(NARROW, conditions).keys() == {"send_chunk", "return_chunk"}
    whole = replace(NARROW, kernel="InterNodeV1LL", options={"timeout_secs": TIMEOUT_SECS})
    assert not turned_away(whole, conditions)


@pytest.mark.parametrize("operation", [150, 600])
def test_the_others_wait_for_a_slow_node(operation: int) -> None:
    faults = tuple(Fault(rank, operation, PAUSE_SECS) for rank in SLOW_NODE)
    run_on_ranks(run_case, NARROW.world_size, NARROW, conditions=Conditions(num_sms=4, faults=faults))


def counting_from(context: Context, case: Case, first: int) -> None:
    """Steps of an op whose rings have moved `first` chunks before."""
    with built_op(context, case) as op:

        def set_counts() -> None:
            for region in (Region.CHUNKS_ARRIVED, Region.CHUNKS_TAKEN):
                op.memory.view(region).fill_(first)
            op.memory.view(Region.CHANNEL_STATE).fill_((first + 2**31) % 2**32 - 2**31)

        op.arena.together("setting the counts of chunks", set_counts)
        for number in range(case.num_steps):
            run_step(case, op, number, context.device)


@pytest.mark.parametrize("first", [2**31 - 4, 2**32 - 4])
def test_counts_of_chunks_wrap(first: int) -> None:
    run_on_ranks(counting_from, NARROW.world_size, NARROW, first, conditions=Conditions(num_sms=4))
