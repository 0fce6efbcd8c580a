"""Our modules beside a vLLM that is stood in for: what closes open steps, and which executors are refused."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ep_a2a.errors import UnsupportedError

OURS = "ep_a2a.integrations.vllm.parallel_config"
NAMES: dict[str, dict[str, Any]] = {"vllm.config.parallel": {"ParallelConfig": object}, "vllm.envs": {}}


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
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield sys.modules["vllm"]
    sys.modules.pop(OURS, None)


@pytest.mark.parametrize(
    ("executor", "is_second", "refused"), [("ray", False, True), ("ray", True, False), ("mp", False, False)]
)
def test_rays_first_executor_is_refused(vllm, executor, is_second, refused):
    """It hands out tokens of a failed step, since it calls workers past their check."""
    from ep_a2a.integrations.vllm.parallel_config import _check_parallel

    vllm.envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND = is_second
    unused = {"enable_elastic_ep": False, "prefill_context_parallel_size": 1}
    parallel = SimpleNamespace(distributed_executor_backend=executor, use_ubatching=False, **unused)
    leave = "Leave VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 or --distributed-executor-backend ray out."
    with pytest.raises(UnsupportedError, match=leave) if refused else contextlib.nullcontext():
        _check_parallel(SimpleNamespace(parallel_config=parallel, lora_config=None))


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
