"""Our modules beside a vLLM that is stood in for: what closes an open step, and which executors are refused."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.manager import VllmAll2AllManager

OURS = tuple(f"ep_a2a.integrations.vllm.{name}" for name in ("prepare_finalize", "parallel_config"))
LAYERS = "vllm.model_executor.layers.fused_moe"
NAMES: dict[str, dict[str, Any]] = {
    f"{LAYERS}.modular_kernel": {"FusedMoEPrepareAndFinalizeModular": object},
    f"{LAYERS}.topk_weight_and_reduce": {"TopKWeightAndReduceContiguous": None, "TopKWeightAndReduceDelegate": None},
    f"{LAYERS}.utils": {"moe_kernel_quantize_input": lambda: None},
    "vllm.v1.worker.ubatching": {
        "dbo_current_ubatch_id": lambda: 0,
        "dbo_enabled": lambda: False,
        "dbo_switch_to_comm": lambda: None,
        "dbo_switch_to_compute": lambda: None,
        "dbo_switch_to_compute_sync": lambda: None,
        "dbo_yield_and_switch_from_comm_to_compute": lambda: None,
        "dbo_yield_and_switch_from_compute_to_comm": lambda: None,
    },
    "vllm.config.parallel": {"ParallelConfig": object},
    "vllm.envs": {},
}


@pytest.fixture
def vllm(monkeypatch):
    """Modules with the names that ours take from vLLM; ours are imported anew."""
    packages = {name.rsplit(".", end)[0] for name in NAMES for end in range(1, name.count(".") + 1)}
    for name in sorted(packages) + list(NAMES):
        module = ModuleType(name)
        vars(module).update(NAMES.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield sys.modules["vllm"]
    for name in OURS:
        sys.modules.pop(name, None)


@pytest.fixture
def prepare_finalize(vllm):
    from ep_a2a.integrations.vllm import prepare_finalize

    return prepare_finalize


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_a_step_closes_the_op(prepare_finalize, error):
    closed: list[str] = []
    layer = prepare_finalize.EpA2APrepareAndFinalize(SimpleNamespace(combines_in_halves=False), None, 8)
    layer._ops = [SimpleNamespace(close=lambda: closed.append("op"))]
    experts = SimpleNamespace(apply=lambda: (_ for _ in ()).throw(error()))
    layer._close_op_when_experts_fail(experts)
    with pytest.raises(error):
        experts.apply()
    assert closed == ["op"]


@pytest.mark.parametrize(
    ("executor", "is_second", "refused"), [("ray", False, True), ("ray", True, False), ("mp", False, False)]
)
def test_rays_first_executor_is_refused(vllm, executor, is_second, refused):
    """It hands out tokens of a failed step, since it calls workers past their check."""
    from ep_a2a.integrations.vllm.parallel_config import _check_parallel

    vllm.envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND = is_second
    parallel = SimpleNamespace(distributed_executor_backend=executor, pipeline_parallel_size=1, use_ubatching=False)
    with pytest.raises(UnsupportedError, match="ray") if refused else contextlib.nullcontext():
        _check_parallel(SimpleNamespace(parallel_config=parallel, lora_config=None))


def test_a_layers_dispatches_carry_its_number(prepare_finalize, monkeypatch):
    calls: list[dict[str, Any]] = []

    def dispatch(*_, **options):
        calls.append(options)
        return torch.zeros(1, 1, 8), torch.zeros(1, 1, 1), None, torch.zeros(1, 1, 1, dtype=torch.int32), None

    monkeypatch.setattr(prepare_finalize, "agreed_max_tokens", lambda *_: 1)
    monkeypatch.setattr(prepare_finalize, "local_ids", lambda ids, weights, _: (ids, weights))
    manager = VllmAll2AllManager.__new__(VllmAll2AllManager)
    manager._layers, manager.combines_in_halves, manager.rank = [], False, 0
    shapes = [SimpleNamespace(hidden_dim=8, moe_parallel_config=SimpleNamespace(sp_size=1)) for _ in range(3)]
    # the first layer is built again, with other weights
    for moe in (*shapes, shapes[0]):
        layer = prepare_finalize.EpA2APrepareAndFinalize(manager, moe, 8)
        op = SimpleNamespace(dispatch=dispatch, config=SimpleNamespace(max_num_inp_token_per_rank=8))
        layer._ops, layer._exchanges, layer._layer_number = [op], [op], manager.layer_number(moe)
        layer.prepare(torch.zeros(1, 8), torch.ones(1, 1), torch.zeros(1, 1), 2, None, False, None)
    assert [options["tag"] for options in calls] == [1, 2, 3, 1]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_whatever_ends_a_workers_call_closes_open_steps(monkeypatch, error):
    from ep_a2a.integrations.vllm import worker

    closed: list[str] = []

    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr(worker, "live_managers", [SimpleNamespace(close_open_steps=lambda: closed.append("step"))])
    with pytest.raises(error):
        worker._checked(fail)(None)
    assert closed == ["step"]
