"""Runs ATOM's own layers over our adapter on two CPU ranks, from a checkout of ROCm/ATOM; AITER is replaced.

    python -m tests.engines.atom.real_layers FOLDER

ATOM's moe.py, modular_kernel.py, ubatching.py and configuration are those of the checkout. AITER's groups are those of
the shape beside this file; all else of AITER is a mock, and its fused_moe is written in torch here. Needs pytest and
what ATOM imports (transformers, zmq, psutil). No test runs it: the project does not bring ATOM along.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ep_a2a.integrations.atom import activate
from ep_a2a.testing import RankContext, RankPool
from tests.cases.atom_cases import shape
from tests.cases.mori_programs import EXPERTS_PER_RANK, HIDDEN_DIM, MAX_TOKENS, NUM_TOKENS, TOPK, own_tokens

LAYERS = 2


class Members(type):
    """Any name is a member of an enum whose values have the class's type."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return SimpleNamespace(value=cls.default, name=name)  # type: ignore[attr-defined]


class Numbers(metaclass=Members):
    default = 0


class Texts(metaclass=Members):
    default = "text"


class Compiled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds mocks for modules of AITER that the shape lacks."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        is_theirs = name.partition(".")[0] == "aiter"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_theirs else None

    def create_module(self, spec: Any) -> Any:
        return mock.MagicMock(
            name=spec.name, __path__=[], __spec__=spec, __name__=spec.name, __all__=[], GateMode=Texts
        )

    def exec_module(self, module: Any) -> None:
        """Nothing is executed."""


def attribute_of_aiter(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Numbers if name in ("ActivationType", "QuantType") else mock.MagicMock(name=name)


def fused_moe(
    rows: torch.Tensor,
    _w1: Any,
    _w2: Any,
    weights: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor,
    *_: Any,
    **given: Any,
) -> torch.Tensor:
    """In place of AITER's: expert e multiplies by e + 1. Rows past num_local_tokens, which nobody reads, become NaN."""
    number = int(given["num_local_tokens"])
    assert number <= len(rows)
    result = torch.full_like(rows, torch.nan)
    local = (ids[:number] >= 0) & mask[ids[:number].clamp(min=0).long()].bool()
    factors = (local * weights[:number] * (ids[:number] + 1)).sum(1, keepdim=True)
    result[:number] = (rows[:number].float() * factors).to(rows.dtype)
    return result


def kernels_of(context: RankContext, folder: str, **settings: Any) -> list[Any]:
    """ATOM's modular kernel of each layer, made by its own method of its layers."""
    package: Any = types.ModuleType("atom")
    package.__path__ = [f"{folder}/atom"]
    sys.modules["atom"] = package
    sys.modules["aiter"].__getattr__ = attribute_of_aiter  # type: ignore[method-assign]
    sys.meta_path.append(Compiled())
    assert activate()
    moe, config = importlib.import_module("atom.model_ops.moe"), importlib.import_module("atom.config")
    modular = importlib.import_module("atom.model_ops.fused_moe.modular_kernel")
    assert all(Path(each.__file__ or "").is_relative_to(folder) for each in (moe, config, modular))
    modular.fused_moe = fused_moe
    config.set_current_atom_config(SimpleNamespace(moe_backend="standard", **settings))
    size, rank = context.world_size, context.rank
    parallel = moe.FusedMoEParallelConfig(1, size, size, 0, rank, rank, use_ep=True, local_ep_size=size)
    layer = moe.FusedMoEConfig(
        num_experts=EXPERTS_PER_RANK * size,
        experts_per_token=TOPK,
        hidden_dim=HIDDEN_DIM,
        num_local_experts=EXPERTS_PER_RANK,
        moe_parallel_config=parallel,
        expert_layout=None,
        in_dtype=torch.bfloat16,
        max_num_tokens=MAX_TOKENS,
    )
    base = moe.FusedMoEMethodBase
    method = type("Method", (base,), dict.fromkeys(base.__abstractmethods__))(layer)
    return [modular.FusedMoEModularKernel(method.maybe_make_prepare_finalize()) for _ in range(LAYERS)]


def run_layers(context: RankContext, kernels: list[Any], seed: int) -> None:
    """A forward pass of all layers, compared with the dense ones."""
    x, weights, ids = own_tokens(context, seed)
    num_experts = EXPERTS_PER_RANK * context.world_size
    mask = (torch.arange(num_experts) // EXPERTS_PER_RANK == context.rank).int()
    for kernel in kernels:
        result = kernel(
            x, torch.empty(EXPERTS_PER_RANK), None, weights, ids, global_num_experts=num_experts, expert_mask=mask
        )
        valid = (ids >= 0) & (ids < num_experts)
        expected = x.float() * (valid * weights * (ids + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(result.float(), expected, rtol=5e-2, atol=5e-2)


def whole_steps(context: RankContext, folder: str) -> None:
    """Prefill, whose rows ATOM keeps all, and decode, whose dead tail it cuts off."""
    with shape(context, "ep_a2a"):
        kernels = kernels_of(context, folder, enable_tbo=False)
        forward = importlib.import_module("atom.utils.forward_context")
        for seed, is_decode in enumerate((False, True)):
            step = forward.Context(
                torch.arange(1), not is_decode, graph_bs=max(NUM_TOKENS), dp_uniform_decode=is_decode
            )
            forward._forward_context_local.ctx = forward.ForwardContext(context=step)
            run_layers(context, kernels, seed)


def overlapped_halves(context: RankContext, folder: str) -> None:
    """Two threads in ATOM's contexts of halves; each runs the other's receiving half (hooks)."""
    with shape(context, "ep_a2a"):
        kernels = kernels_of(context, folder, enable_tbo=True)
        forward = importlib.import_module("atom.utils.forward_context")
        ubatching = importlib.import_module("atom.utils.tbo.ubatching")
        errors: list[BaseException] = []

        def run(half: Any) -> None:
            try:
                with half:
                    run_layers(context, kernels, half.ubatch_id)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        step = forward.Context(torch.arange(1), is_prefill=True, dp_uniform_decode=False)
        steps = [forward.ForwardContext(context=step) for _ in range(2)]
        with mock.patch.object(torch, "Event", mock.MagicMock), mock.patch.object(torch.cuda, "set_stream"):
            barrier = threading.Barrier(3)
            halves = ubatching.make_tbo_contexts(2, None, None, steps, barrier)
            threads = [threading.Thread(target=run, args=(half,)) for half in halves]
            for thread in threads:
                thread.start()
            barrier.wait()
            halves[0].cpu_wait_event.set()
            for thread in threads:
                thread.join()
        assert not errors, errors


if __name__ == "__main__":
    with RankPool(2, timeout_secs=1200.0) as pool:
        for body in (whole_steps, overlapped_halves):
            pool.run(body, str(Path(sys.argv[1]).resolve()))
            sys.stdout.write(f"{body.__name__}: the sums are those of the dense layers\n")
            sys.stdout.flush()
