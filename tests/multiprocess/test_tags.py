"""Tags of calls over exchanges that the host makes; those of kernels that store are in tests/simulator/test_tags.py."""

from typing import Any

from ep_a2a.errors import ConfigMismatchError
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, make_inputs, make_op, run_step
from tests.cases.op_checks import raised
from tests.cases.staged_cases import node_arena, over_torch_distributed

NODES = Case(world_size=4, num_nodes=2, num_experts=8, tokens=((3, 2, 4, 1),))


def other_tags(context: RankContext, case: Case) -> None:
    case = over_torch_distributed(case)
    with node_arena(context, case.num_nodes) as arena:
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        mine = make_inputs(case, 0, context.rank)
        op.dispatch(mine.tokens, mine.weights, mine.scales, mine.ids, tag=5 + (context.rank == 2))
        arena.rendezvous.barrier("dispatched")
        raised(ConfigMismatchError, op.check, "rank 0: tag 5, rank 1: tag 5, rank 2: tag 6, rank 3: tag 5")
        op.reset()
        run_step(case, op, 1, context.device)


def test_over_torch_distributed(ranks: Any) -> None:
    ranks(other_tags, NODES.world_size, NODES)
