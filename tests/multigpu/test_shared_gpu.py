"""Ranks that share one GPU: every pair of choices with 2 to 8 ranks, virtual nodes, and every case of the op with 8.

`python -m tests.multigpu.precompile` compiles the kernels first, with all cores of the host. After it
`pytest -n 3` takes less than half the time of one worker, on 16 cores. With EP_A2A_TEST_RESULTS=FOLDER what has passed
is noted there, and left out of the next run.
"""

from typing import Any

import pytest
import torch

from ep_a2a.memory.arena import Arena
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, run_case, with_options
from tests.cases.ring_cases import SHAPES_AND_FLAT
from tests.multigpu.cases import SHARED_WORLDS, of_eight_ranks, shared_choices, soaked_sizes
from tests.multigpu.used_variants import compiled_when_used
from tests.programs.soak import SelfCheckingStep, soak

FIRST_STEP_SECS = {"first_timeout_secs": 120.0}
"""Ops that compile what they launch wait for ranks that compile."""
W = 8
SIZES = soaked_sizes()

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_GPUS != 1, reason=f"needs one GPU for all ranks, found {NUM_GPUS}")
# finding the pairs takes seconds
WORLDS = SHARED_WORLDS if NUM_GPUS == 1 else ()


def run_compiled_when_used(ranks: Any, case: Case) -> None:
    case = with_options(case, **FIRST_STEP_SECS)
    ranks(compiled_when_used, case.world_size, run_case, case)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name) for world_size in WORLDS for name, case in shared_choices(world_size)]
)
def test_all_pairs(ranks: Any, case: Case) -> None:
    run_compiled_when_used(ranks, case)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in of_eight_ranks()])
def test_eight_ranks(ranks: Any, case: Case) -> None:
    run_compiled_when_used(ranks, case)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in SHAPES_AND_FLAT.items()])
def test_virtual_nodes(ranks: Any, case: Case) -> None:
    run_compiled_when_used(ranks, case)


def sized(num_tokens: int) -> Case:
    return with_options(SIZES[num_tokens], **FIRST_STEP_SECS)


def eager_steps(context: RankContext, case: Case, num_steps: int) -> int:
    """Self-checking steps without a graph; the elements that were wrong."""
    with Arena(context.group, context.device) as arena:
        step = SelfCheckingStep(context, case, arena)
        for _ in range(num_steps):
            step.draw()
            step.move()
            step.compare()
        torch.cuda.synchronize(context.device)
        step.op.check()
        return int(step.num_wrong)


@pytest.mark.parametrize("num_tokens", SIZES)
def test_dependent_launches_leave_room_in_graphs(ranks: Any, num_tokens: int) -> None:
    case = sized(num_tokens)
    found = ranks(compiled_when_used, W, soak, case, 1500)
    assert [(each.num_round_trips, each.num_wrong) for each in found] == [(1500, 0)] * W


@pytest.mark.parametrize("num_tokens", SIZES)
def test_dependent_launches_leave_room_in_eager_calls(ranks: Any, num_tokens: int) -> None:
    case = sized(num_tokens)
    assert ranks(compiled_when_used, W, eager_steps, case, 300) == [0] * W


def two_ops_in_opposite_order(context: RankContext, case: Case, num_rounds: int) -> tuple[int, list[int]]:
    """Two ops on two streams, in opposite order on odd ranks, beside products that fill the GPU.

    Returns:
        (elements that were wrong, bounds on the ops' multiprocessors).
    """
    with Arena(context.group, context.device) as arena:
        steps = [SelfCheckingStep(context, case, arena) for _ in range(2)]
        streams = [torch.cuda.Stream(context.device) for _ in steps]
        matrix = torch.randn(4096, 4096, device=context.device, dtype=torch.bfloat16)
        for step in steps:
            for work in (step.draw, step.move, step.compare):
                work()
        torch.cuda.synchronize(context.device)
        order = (0, 1) if context.rank % 2 == 0 else (1, 0)
        for _ in range(num_rounds):
            torch.matmul(matrix, matrix)
            for which in order:
                with torch.cuda.stream(streams[which]):
                    for work in (steps[which].draw, steps[which].move, steps[which].compare):
                        work()
        torch.cuda.synchronize(context.device)
        for step in steps:
            step.op.check()
        return sum(int(step.num_wrong) for step in steps), [step.op.engine.kernels.max_sms for step in steps]


@pytest.mark.parametrize("num_tokens", [1, 32, 256])
def test_two_ops_in_opposite_order(ranks: Any, num_tokens: int) -> None:
    case = sized(num_tokens)
    share = torch.cuda.get_device_properties(0).multi_processor_count // W // 2
    found = ranks(compiled_when_used, W, two_ops_in_opposite_order, case, 30)
    assert found == [(0, [share, share])] * W
