"""Ranks die at once, also the one that held the group's store; the others go on with a manager of their own."""

import json
from pathlib import Path

import pytest

from ep_a2a.memory.arena import CLOSE_PATIENCE_SECS
from ep_a2a.testing import RankFailure, RankPool
from tests.cases.fault_cases import SLACK_SECS
from tests.cases.op_cases import Case
from tests.cases.survivor_cases import NO_STORE_SECS, die_and_go_on

CASE = Case(hidden_dim=32, num_experts=8, tokens=((4, 3, 5, 2),), max_tokens=5)


@pytest.mark.parametrize(
    ("victims", "store_dies", "lost"),
    # tests/integration/test_examples.py has other victims
    [((1, 2), False, [2]), ((0, 3), True, [0])],
)
def test_survivors_go_on(victims: tuple[int, ...], store_dies: bool, lost: list[int], tmp_path: Path) -> None:
    with RankPool(4, timeout_secs=120, grace_secs=90) as pool, pytest.raises(RankFailure) as caught:
        pool.run(die_and_go_on, CASE, list(victims), store_dies, str(tmp_path))
    assert sorted(caught.value.tracebacks) == list(victims), str(caught.value)
    left = [rank for rank in range(4) if rank not in victims]
    for place, rank in enumerate(left):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert (seen["missing"], seen["late"]) == (list(victims), [])
        assert (seen["ranks"], seen["rank"], seen["lost"]) == (left, place, lost)
        assert seen["experts"] == [expert for each in left for expert in (each, (each + 1) % 4)]
        assert seen["destroy_secs"] < CLOSE_PATIENCE_SECS + SLACK_SECS
        assert seen.get("no_store_secs", 0) < NO_STORE_SECS
