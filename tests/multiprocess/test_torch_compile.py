"""Calls inside a function that torch.compile compiles break its graph, and give what they give without it."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ep_a2a
from ep_a2a.compat.deep_ep import Buffer
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import DispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.manager_cases import kwargs_of
from tests.cases.mori_programs import make_config, mori_world
from tests.cases.op_cases import Case

Layer = Callable[[torch.Tensor], torch.Tensor]

SHAPE = {"hidden_size": 16, "num_experts": 4, "topk": 2, "max_tokens": 4}
WEIGHTS = torch.tensor([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]])
IDS = torch.tensor([[0, 2], [3, 2], [1, 0]], dtype=torch.int32)


def whole_calls(op: DispatchCombineOp) -> Layer:
    def layer(tokens: torch.Tensor) -> torch.Tensor:
        received = op.dispatch(tokens * 2, WEIGHTS, None, IDS, step_tokens=3)
        return op.combine(received.tokens * 3, None, IDS).tokens[:3] + 1

    return layer


def split_calls(op: DispatchCombineOp) -> Layer:
    def layer(tokens: torch.Tensor) -> torch.Tensor:
        op.dispatch_send(tokens * 2, WEIGHTS, None, IDS)
        tokens = tokens + 1
        received = op.dispatch_recv()
        op.combine_send(received.tokens * 3, None, IDS)
        return op.combine_recv().tokens[:3] + tokens

    return layer


def through_a_manager(manager: Any) -> Layer:
    def layer(tokens: torch.Tensor) -> torch.Tensor:
        rows, *_ = manager.dispatch(tokens * 2, WEIGHTS, IDS)
        return manager.combine(rows * 3) + 1

    return layer


def through_deep_ep(buffer: Any) -> Layer:
    ids = IDS.long()

    def layer(tokens: torch.Tensor) -> torch.Tensor:
        tokens = (tokens * 2).to(torch.bfloat16)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(tokens, ids, 4, 4, use_fp8=False, return_recv_hook=True)
        hook()
        combined, _, hook = buffer.low_latency_combine(rows, ids, WEIGHTS, handle, return_recv_hook=True)
        hook()
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 4)
        rows, _, _, _, handle, _ = buffer.dispatch(
            combined, None, per_rank, None, is_in_rank, per_expert, topk_idx=ids, topk_weights=WEIGHTS
        )
        return buffer.combine(rows, handle)[0] + 1

    return layer


def through_mori(op: Any) -> Layer:
    def layer(tokens: torch.Tensor) -> torch.Tensor:
        received = op.dispatch(tokens * 2, WEIGHTS, None, IDS)
        return op.combine(received[0], None, IDS)[0][:3] + 1

    return layer


def compare(layer: Layer, rank: int, backend: str, num_graphs: int = 3) -> None:
    """Three steps of the layer, compiled, are those without torch.compile; its own code is in graphs."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=graphs)
    for step in range(3):
        tokens = torch.arange(48, dtype=torch.float32).reshape(3, 16) + 100 * rank + step
        assert torch.equal(compiled(tokens).clone(), layer(tokens))
    # the code before, between and behind the calls; no step compiles again
    assert graphs.frame_count == num_graphs, [graph.code for graph in graphs.graphs]


def of_an_op(context: RankContext, name: str, backend: str) -> None:
    with ep_a2a.make_op(context.group, dtype=torch.float32, **SHAPE) as op:
        compare(globals()[name](op), context.rank, backend, {"whole_calls": 3, "split_calls": 4}[name])


def of_a_manager(context: RankContext, backend: str) -> None:
    with ep_a2a.create_manager(backend, context.group) as manager:
        manager.device = torch.device("cpu")
        handle = None
        if backend == "ep_a2a":
            case = Case(context.world_size, hidden_dim=16, num_experts=4, max_tokens=4, dtype=torch.float32)
            handle = manager.get_handle(kwargs_of(case, context.rank))
        compare(through_a_manager(manager), context.rank, "eager")
        del handle


def of_deep_ep(context: RankContext) -> None:
    buffer = Buffer(context.group, 0, 0, device=context.device, explicitly_destroy=True)
    compare(through_deep_ep(buffer), context.rank, "eager", 2)
    buffer.destroy()


def of_mori(context: RankContext) -> None:
    with mori_world(context) as mori:
        sizes = {"hidden_dim": 16, "max_num_inp_token_per_rank": 4, "num_experts_per_rank": 2}
        config = make_config(mori, context, data_type=torch.float32, **sizes)
        compare(through_mori(mori.ops.EpDispatchCombineOp(config)), context.rank, "eager", 2)


def whole_graph(context: RankContext) -> None:
    with ep_a2a.make_op(context.group, dtype=torch.float32, **SHAPE) as op:
        layer = torch.compile(whole_calls(op), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"ep_a2a exchanges tokens .* Drop fullgraph=True from torch\.compile"):
            layer(torch.ones(3, 16))


@pytest.mark.parametrize("name", ["whole_calls", "split_calls"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_op(ranks: Any, name: str, backend: str) -> None:
    ranks(of_an_op, 2, name, backend)


@pytest.mark.parametrize("backend", ["ep_a2a", "naive"])
def test_a_manager(ranks: Any, backend: str) -> None:
    ranks(of_a_manager, 2, backend)


def test_deep_ep(ranks: Any) -> None:
    ranks(of_deep_ep, 2)


def test_mori(ranks: Any) -> None:
    ranks(of_mori, 2)


def test_a_whole_graph_is_refused(ranks: Any) -> None:
    ranks(whole_graph, 1)


def test_a_call_costs_one_more_call_of_python() -> None:
    calls: list[str] = []

    @outside_graphs
    def call(self: object) -> None: ...

    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    call(None)
    sys.setprofile(None)
    assert calls == ["guard", "call"]
