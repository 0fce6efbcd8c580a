"""Ops across virtual nodes on GPUs: NCCL between nodes, NVLink inside, against the oracle."""

from typing import Any

import pytest

from tests.cases.op_cases import BY_HOSTS, Case, run_case
from tests.cases.op_matrix import UNEVEN

FORMS = {
    "compact": {"layout": "compact"},
    "rank_major": {"layout": "rank_major", "routing": "out_of_range"},
    "cast": {"layout": "rank_major", "quant_type": "fp8_per_1x128", "hidden_dim": 256},
    "biases": {"layout": "rank_major", "num_biases": 2},
    "halves": {"layout": "rank_major", "split": "mixed"},
    "expert_major": {"layout": "expert_major"},
}


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 1), (2, 2), (4, 2)])
def test_it_moves_tokens(ranks: Any, num_nodes: int, per_node: int, changes: dict[str, Any]) -> None:
    world_size = num_nodes * per_node
    case = Case(
        world_size=world_size,
        num_nodes=num_nodes,
        num_experts=2 * world_size + 1,
        topk=3,
        tokens=UNEVEN,
        options=BY_HOSTS,
        **changes,
    )
    ranks(run_case, world_size, case)
