"""A rank that leaves out a layer: all ranks get ConfigMismatchError with the tags, and no result pairs two layers."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ep_a2a.errors import ConfigMismatchError
from ep_a2a.kernels.layout import FailureCode, Region
from tests.cases.op_cases import Case, Step, arena_of, make_op, same_sums
from tests.simulator.cases import CASES
from tests.simulator.ranks import Conditions, Context, simulate
from tests.simulator.runs import run_on_ranks

ALL_LAYERS = (1, 2, 3, 1, 2, 3)
SKIPPER, LAYERS_OF_SKIPPER = 1, (1, 3, 1, 2, 3)
VARIANTS = {
    "low_latency": CASES["low_latency"],
    "low_latency_halves": CASES["low_latency_compact"],
    "bulk": CASES["bulk"],
    "bulk_halves": CASES["bulk_compact"],
    "expert_major": CASES["expert_major"],
    "rings": CASES["rings"],
    "staged": CASES["staged"],
}


def run_layers(done: dict[int, int], layers: dict[int, Sequence[int]], context: Context, case: Case) -> None:
    """One step per layer. Counts the combines of each rank whose result is right; any other result fails here."""
    rank = context.rank
    op = make_op(context, case, arena_of(context, case))
    dispatch, send = op.dispatch, op.dispatch_send
    done[rank] = 0
    for number, layer in enumerate(layers.get(rank, ALL_LAYERS)):
        # Step knows no tags
        op.dispatch = functools.partial(dispatch, tag=layer)  # type: ignore[method-assign]
        op.dispatch_send = functools.partial(send, tag=layer)  # type: ignore[method-assign]
        step = Step.dispatch(case, op, number, context.device)
        rows, _, expected, _ = step.before_combine()
        got = op.combine(rows, None, step.ids)[0][: len(expected)].clone()
        op.check()
        same_sums(got, expected, f"combine of step {number}")
        done[rank] += 1


@pytest.mark.parametrize("landing", ["newest", pytest.param("oldest", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_rank_leaves_out_a_layer(name: str, landing: str) -> None:
    case, done = VARIANTS[name], dict[int, int]()
    body = functools.partial(run_layers, done, {SKIPPER: LAYERS_OF_SKIPPER})
    found = simulate(case.world_size, body, case, conditions=Conditions(num_sms=4, landing=landing))
    assert [type(error) for error in found.errors] == [ConfigMismatchError] * case.world_size
    # the first layer is combined, nothing behind it is
    assert done == dict.fromkeys(range(case.world_size), 1)
    tags = ", ".join(f"rank {rank}: tag {3 if rank == SKIPPER else 2}" for rank in range(case.world_size))
    texts = [str(error) for error in found.errors]
    assert any(tags in text for text in texts), texts
    assert all(tags in text or "another rank reported a difference" in text for text in texts), texts


@pytest.mark.parametrize("name", ["low_latency", "bulk"])
def test_equal_tags_change_nothing(name: str) -> None:
    case, done = replace(VARIANTS[name], num_steps=len(ALL_LAYERS)), dict[int, int]()
    found = simulate(case.world_size, functools.partial(run_layers, done, {}), case, conditions=Conditions(num_sms=4))
    assert found.errors == [None] * case.world_size
    assert done == dict.fromkeys(range(case.world_size), len(ALL_LAYERS))


def choices_of_a_late_rank(context: Context, case: Case) -> None:
    """A rank's choice counts once it has come to the step that this rank is in."""
    with arena_of(context, case) as arena:
        memory = make_op(context, case, arena).memory
        for epochs, found in (((5, 5), (3, 7)), ((5, 4), ())):
            memory.view(Region.COUNTS)[:, -1] = torch.tensor(
                [epoch << 32 | word for epoch, word in zip(epochs, (3, 7))]
            )
            assert memory.choices_of_step(FailureCode.STEP_TOKENS_MISMATCH) == found


def test_no_choice_of_an_earlier_step_is_told() -> None:
    run_on_ranks(choices_of_a_late_rank, 2, VARIANTS["low_latency"])
