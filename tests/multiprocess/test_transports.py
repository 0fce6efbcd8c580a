"""Every kernel over every transport between nodes, against the oracle."""

from dataclasses import replace
from typing import Any

import pytest

from ep_a2a.config import INTERNODE_TRANSPORTS, EpDispatchCombineKernelType
from ep_a2a.memory.arena import Arena
from ep_a2a.ops.factory import OpFactory
from ep_a2a.reference import DispatchReference
from ep_a2a.testing import RankContext
from ep_a2a.topology import classify, gather_report
from tests.cases.op_cases import Case, Step
from tests.cases.op_matrix import UNEVEN
from tests.cases.ring_cases import REPLAYED, other_numbers_of_programs, rings

ALL_KERNELS = ("InterNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL")
COMBINATIONS = [
    ("shared_memory", "IntraNode"),
    *((name, kernel) for name in INTERNODE_TRANSPORTS if name != "auto" for kernel in ALL_KERNELS),
]
FORMS = {
    "compact": Case(layout="compact"),
    "rank_major-halves": Case(layout="rank_major", split="mixed", pad_id=-7, step_tokens=(13, "own", None)),
    "expert_major-cast": Case(
        layout="expert_major", quant_type="fp8_per_1x128", hidden_dim=256, step_tokens=("own", None)
    ),
    "combine-cast": Case(layout="compact", quant_type="fp8_blockwise", hidden_dim=256, split="all"),
}


def case_of(form: str) -> Case:
    return replace(FORMS[form], topk=3, num_experts=9, tokens=UNEVEN, routing="out_of_range")


def check_shapes(step: Step, expected: DispatchReference) -> None:
    """The whole of each returned tensor, padding included; the reference has none in layout compact."""
    bounds = step.case.stride(step.number) or step.case.max_tokens
    most_rows = (bounds * step.case.world_size if isinstance(bounds, int) else sum(bounds),)
    for found, right in zip(step.got[:4], (expected.tokens, expected.weights, expected.scales, expected.ids)):
        assert (found is None) == (right is None)
        if found is not None and right is not None:
            lead = most_rows if step.case.layout == "compact" else tuple(right.shape[:-1])
            assert tuple(found.shape) == (*lead, *right.shape[len(lead) :])


def some_steps(context: RankContext, transport: str, kernel: str, form: str) -> None:
    case, rank = case_of(form), context.rank
    gpus_per_node = case.world_size if transport == "shared_memory" else 2
    case = replace(case, num_nodes=case.world_size // gpus_per_node)
    with Arena(context.group, context.device) as arena:
        factory = OpFactory(arena)
        config = case.config(
            rank,
            kernel_type=EpDispatchCombineKernelType[kernel],
            gpu_per_node=gpus_per_node,
            internode_transport="auto" if transport == "shared_memory" else transport,
        )
        topology = classify(gather_report(context.group), gpus_per_node)
        op: Any = factory.make(config, topology, 0)
        for number in range(3):
            step = Step.dispatch(case, op, number, context.device)
            check_shapes(step, step.reference[rank])
            step.check_dispatched()
            step.combine()
        assert len(op.get_launch_config()) == 3
        op.check()
        op.close()
        factory.close()


@pytest.mark.parametrize(("number", "transport", "kernel"), [(n, *each) for n, each in enumerate(COMBINATIONS)])
def test_every_kernel_and_transport(ranks: Any, number: int, transport: str, kernel: str) -> None:
    """In one form each, in turn: tests/multiprocess/test_covering.py pairs layouts and casts with the transports."""
    ranks(some_steps, 4, transport, kernel, list(FORMS)[number % len(FORMS)])


def test_ranks_may_ask_for_different_numbers_of_programs(ranks: Any) -> None:
    case = replace(REPLAYED, tokens=((8, 8),), options=rings(1, 1, 4) | {"block_num": 2})
    ranks(other_numbers_of_programs, 2, case)
