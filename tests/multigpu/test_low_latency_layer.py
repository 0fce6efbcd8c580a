"""Triton-distributed's layer on GPUs: the bodies of tests/multiprocess, and a captured graph."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_a2a.memory.arena import Arena
from ep_a2a.testing import RankContext
from tests.cases.low_latency_cases import CASES, LayerStep, in_turn, make_layer, run_step
from tests.cases.op_cases import Case, make_inputs
from tests.multigpu.cases import fitted
from tests.multiprocess.test_low_latency_layer import test_between_nodes, test_special  # noqa: F401


@pytest.mark.parametrize("name", CASES)
def test_steps_in_turn(ranks: Any, name: str) -> None:
    case = fitted(replace(CASES[name], world_size=8))
    ranks(in_turn, case.world_size, case)


def replayed(context: RankContext, case: Case) -> None:
    """Dispatch, experts and combine in a graph, replayed with other weights each time, and eager steps in between."""
    with Arena(context.group, context.device) as arena:
        layer = make_layer(context, case, arena)
        run_step(case, layer, 0, context)
        tokens, own_weights, _, ids = make_inputs(case, 0, context.rank).on(context.device)
        weights = own_weights.clone()
        eager = LayerStep.of(case, layer, 0, context)
        rows = eager.experts()
        eager.check_result(eager.result())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, _, _, meta = layer.dispatch(tokens, None, ids)
            out = layer.combine(rows, ids, weights, meta)
        for factor in (1.0, 2.0, 0.5):
            weights.copy_(own_weights * factor)
            graph.replay()
            torch.cuda.synchronize()
            # powers of two change no rounding
            eager.check_result((out.float() / factor).to(out.dtype))
        run_step(case, layer, 1, context)


def test_in_a_graph(ranks: Any) -> None:
    ranks(replayed, 2, CASES["bf16"])
