"""The adapter for CollectiveX over the names of its base class; the adapter says how to run the real one."""

import abc
import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from ep_a2a.testing import RankContext

ADAPTER = Path(__file__).resolve().parents[2] / "bench" / "collectivex" / "ep_a2a_backend.py"
# of EPBackend, at commit 843c6254 of SemiAnalysisAI/InferenceX
ABSTRACT = ["create_buffer", "dispatch", "stage", "combine", "recv_tokens", "inspect_dispatch", "combine_transformed"]
IDS = torch.tensor([[0, 2], [3, 2], [1, 0]], dtype=torch.int32)
"""Of the three tokens of either rank. Rank 0 owns experts 0 and 1, rank 1 owns 2 and 3."""
WEIGHTS = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]])


def set_attributes(self, args, rank, world_size, local_rank, device) -> None:
    self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
    self.mode, self.precision = args.mode, args.precision


def load_adapter() -> ModuleType:
    methods = {name: abc.abstractmethod(lambda self: None) for name in ABSTRACT}
    base = abc.ABCMeta("EPBackend", (), {"__init__": set_attributes, **methods})
    modules = {"ep_harness": SimpleNamespace(), "ep_backend": SimpleNamespace(EPBackend=base)}
    spec = importlib.util.spec_from_file_location("ep_a2a_backend", ADAPTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        spec.loader.exec_module(module)
    return module


def one_case(context: RankContext, mode: str, precision: str, layout: str) -> None:
    args = argparse.Namespace(mode=mode, precision=precision, hidden=128, experts=4, topk=2)
    backend = load_adapter().EpA2ABackend(args, context.rank, context.world_size, context.rank, context.device)
    assert backend.receive_layout == layout
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(67)).bfloat16()
    seen = backend.semantic_payload(x)
    assert torch.equal(seen, x) == (precision == "bf16")
    mine = slice(3 * context.rank, 3 * context.rank + 3)
    problem = SimpleNamespace(T=3, dispatch_x=x[mine], topk_idx=IDS, topk_weights=WEIGHTS)
    backend.create_buffer(SimpleNamespace(max_tokens_per_rank=4))

    handle = backend.dispatch(problem)
    view = backend.inspect_dispatch(problem, handle)
    ids, weights = IDS.repeat(2, 1).long(), WEIGHTS.repeat(2, 1)
    own = ids // 2 == context.rank
    slots = torch.tensor([(ids == expert).sum() for expert in (2 * context.rank, 2 * context.rank + 1)])
    assert torch.equal(view.local_expert_counts, slots)
    if layout == "token-rank":
        rows = own.any(1)
        assert torch.equal(view.payload, seen[rows])
        assert torch.equal(view.expert_ids, ids.masked_fill(~own, -1)[rows])
        assert torch.equal(view.weights, weights.masked_fill(~own, 0)[rows])
    else:
        pairs = [(expert, row) for expert in range(4) for row in range(6) if expert in ids[row][own[row]]]
        assert view.expert_ids.tolist() == [expert for expert, _ in pairs]
        assert torch.equal(view.payload, seen[[row for _, row in pairs]])
    assert backend.recv_tokens(handle) == len(view.payload)
    # the weights of a token add up to 1; the first goes to two ranks, the others to one
    factors = torch.tensor([[2], [1], [1]]) if layout == "token-rank" else 1
    assert torch.equal(backend.combine_transformed(problem, handle, view.payload), seen[mine] * factors)
    handle = backend.dispatch(problem)
    backend.stage(problem, handle)
    assert torch.equal(backend.combine(problem, handle), seen[mine] * factors)
    backend.op.close()


@pytest.mark.parametrize("case", [("normal", "bf16", "token-rank"), ("low-latency", "fp8", "token-expert")])
def test_a_case(ranks, case: tuple[str, str, str]) -> None:
    ranks(one_case, 2, *case)
