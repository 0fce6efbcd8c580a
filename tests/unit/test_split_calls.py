"""What a call in halves needs compiled before it is captured."""

from typing import Any

import pytest
import torch

from ep_a2a.ops.arguments import RECEIVE, SEND, WHOLE, CombineArguments, Stages, Step
from ep_a2a.ops.intra_node import IntraNodeEngine, dispatch_kernel
from ep_a2a.policy import Phase, dispatch_phase
from tests.unit.test_config import config_of

CPU = torch.device("cpu")
NUM_SMS = 132


@pytest.mark.parametrize("layout", ["rank_major", "compact"])
def test_the_halves_that_a_step_needs_are_compiled_beforehand(layout):
    """Of a step that is captured before any like it has run."""
    config = config_of(
        rank=0, world_size=2, num_experts_per_rank=4, max_num_inp_token_per_rank=4096, layout=layout, hidden_dim=1024
    )
    engine = IntraNodeEngine(config, torch.zeros(64, 2, dtype=torch.int64), CPU)
    kernels = engine.kernels
    kernels.num_sms, kernels.can_depend, kernels.interpreted = NUM_SMS, True, False
    word, floats = torch.empty(16, dtype=torch.int32), torch.empty(16, dtype=torch.float32)
    rows = torch.empty(16, dtype=config.data_type)
    listed = {
        stages: {id(variant) for variant, _ in engine.compiled_kernels(stages)} for stages in (WHOLE, SEND, RECEIVE)
    }
    assert not listed[SEND] & listed[WHOLE] - {id(kernels.count)}

    def needed(tokens: int, stages: Stages) -> list[Any]:
        phase = dispatch_phase(config, tokens)
        dispatch = Step(rows, floats, None, word, tokens, num_tokens=tokens)
        launches = [engine.launch_of(each, tokens, tokens) for each in (phase, Phase.COMBINE)]
        combine = CombineArguments(rows, None, None, rows, num_tokens=tokens, step_tokens=tokens)
        return [
            dispatch_kernel(kernels, dispatch, phase, launches[0], stages),
            engine._combine_kernel(combine, launches[1], stages, in_place=False),
        ]

    for tokens in (1, 7, 16, 63, 64, 65, 128, 129, 255, 256, 1000, 4096):
        for stages in (SEND, RECEIVE):
            assert {id(variant) for variant in needed(tokens, stages)} <= listed[stages], (tokens, stages)
