"""What ends a step of vLLM between dispatch and combine closes its op, whatever it is. vLLM is stood in for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.integrations.vllm.manager import VllmAll2AllManager

OURS = "ep_a2a.integrations.vllm.prepare_finalize"
LAYERS = "vllm.model_executor.layers.fused_moe"
NAMES: dict[str, dict[str, Any]] = {
    f"{LAYERS}.modular_kernel": {"FusedMoEPrepareAndFinalizeModular": object},
    f"{LAYERS}.topk_weight_and_reduce": {"TopKWeightAndReduceContiguous": None, "TopKWeightAndReduceDelegate": None},
    f"{LAYERS}.utils": {"moe_kernel_quantize_input": lambda: None},
}


@pytest.fixture
def prepare_finalize(monkeypatch):
    """Our module, imported beside modules that have the names it takes from vLLM."""
    parts = LAYERS.split(".")
    packages = [".".join(parts[: end + 1]) for end in range(len(parts))]
    for name in (*packages, *NAMES):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, members in NAMES.items():
        vars(sys.modules[name]).update(members)
    for name in (*packages[1:], *NAMES):
        parent, _, child = name.rpartition(".")
        setattr(sys.modules[parent], child, sys.modules[name])
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    from ep_a2a.integrations.vllm import prepare_finalize

    yield prepare_finalize
    sys.modules.pop(OURS, None)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_a_step_closes_the_op(prepare_finalize, error):
    closed: list[str] = []
    layer = prepare_finalize.EpA2APrepareAndFinalize(SimpleNamespace(combines_in_halves=False), None, 8)
    layer._op = SimpleNamespace(close=lambda: closed.append("op"))
    experts = SimpleNamespace(apply=lambda: (_ for _ in ()).throw(error()))
    layer._close_op_when_experts_fail(experts)
    with pytest.raises(error):
        experts.apply()
    assert closed == ["op"]


def test_a_layers_dispatches_carry_its_number(prepare_finalize, monkeypatch):
    calls: list[dict[str, Any]] = []

    def dispatch(*_, **options):
        calls.append(options)
        return torch.zeros(1, 1, 8), torch.zeros(1, 1, 1), None, torch.zeros(1, 1, 1, dtype=torch.int32), None

    monkeypatch.setattr(prepare_finalize, "agreed_max_tokens", lambda *_: 1)
    monkeypatch.setattr(prepare_finalize, "local_ids", lambda ids, weights, _: (ids, weights))
    manager = VllmAll2AllManager.__new__(VllmAll2AllManager)
    manager._layers, manager.combines_in_halves, manager.rank = [], False, 0
    shapes = [SimpleNamespace(moe_parallel_config=SimpleNamespace(sp_size=1)) for _ in range(3)]
    # the first layer is built again, with other weights
    for moe in (*shapes, shapes[0]):
        layer = prepare_finalize.EpA2APrepareAndFinalize(manager, moe, 8)
        layer._exchange, layer._layer_number = SimpleNamespace(dispatch=dispatch), manager.layer_number(moe)
        layer.prepare(torch.zeros(1, 8), torch.ones(1, 1), torch.zeros(1, 1), 2, None, False, None)
    assert [options["tag"] for options in calls] == [1, 2, 3, 1]
