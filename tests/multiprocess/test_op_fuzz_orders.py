"""Calls in orders that nobody thought of, right and wrong ones, on CPU processes against the oracle, by hypothesis."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.call_orders import CALLS, GO_ON, GO_ON_IN_HALVES, NUM_OPS, OTHERS, Action, run_actions
from tests.multiprocess.test_op_fuzz import cases, fuzz

if TYPE_CHECKING:
    from tests.cases.op_cases import Case

NUM_EXAMPLES = {2: 12, 3: 4}
NUM_ACTIONS = 40
# as many that go on as others, or steps would hardly ever come to their end
DRAWN = (*CALLS, *OTHERS, *(GO_ON,) * (len(CALLS) // 2), *(GO_ON_IN_HALVES,) * (len(CALLS) // 2))


@st.composite
def orders(draw: st.DrawFn, world_size: int) -> tuple[Case, list[Action]]:
    """A case without the end of the epochs, since ops are built anew, and what is done."""
    case = replace(draw(cases(world_size)), first_epoch=0)
    action = st.builds(
        Action,
        op=st.integers(0, NUM_OPS - 1),
        call=st.sampled_from(DRAWN),
        ranks=st.sampled_from([tuple(range(world_size)), (0,), (world_size - 1,)]),
    )
    return case, draw(st.lists(action, min_size=NUM_ACTIONS, max_size=NUM_ACTIONS))


@pytest.mark.parametrize("world_size", NUM_EXAMPLES)
def test_orders(ranks: Any, world_size: int) -> None:
    @fuzz(NUM_EXAMPLES[world_size])
    @given(orders(world_size))
    def run(drawn: tuple[Case, list[Action]]) -> None:
        ranks(run_actions, world_size, *drawn)

    run()
