"""Rank bodies for ep_a2a.integrations.atom.

They run on the shape of ATOM and AITER (tests/engines/atom/shape), not on these libraries, which need ROCm.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from ep_a2a.compat.aiter.managers import MoriHandles
from ep_a2a.compat.mori import install, uninstall
from ep_a2a.errors import ClosedError, UnsupportedError
from ep_a2a.integrations.atom import activate
from ep_a2a.integrations.atom.manager import install_manager
from ep_a2a.testing import RankContext
from tests.cases.manager_cases import kwargs_of
from tests.cases.mori_programs import (
    EXPERTS_PER_RANK,
    HIDDEN_DIM,
    MAX_TOKENS,
    SITUATIONS,
    TOPK,
    check_combined,
    expected_sums,
    own_tokens,
)
from tests.cases.op_cases import Case

SHAPE = Path(__file__).parents[1] / "engines/atom/shape"


def _is_theirs(name: str) -> bool:
    return name.partition(".")[0] in ("atom", "aiter")


@contextlib.contextmanager
def shape(context: RankContext, backend: str = "") -> Iterator[Any]:
    """Processes of ATOM as far as its shape goes: the groups, and EP_A2A_BACKEND. Yields the EP communicator."""
    finders = list(sys.meta_path)
    sys.path.insert(0, str(SHAPE))
    os.environ["EP_A2A_BACKEND"] = backend
    try:
        state = importlib.import_module("aiter.dist.parallel_state")
        communicators = importlib.import_module("aiter.dist.device_communicators.communicator_cuda")
        group = context.group
        device_group = group if context.device.type == "cuda" else None
        communicator = communicators.CudaCommunicator(group, context.device, device_group, "ep:0")
        state.groups["ep"] = SimpleNamespace(device_communicator=communicator)
        yield communicator
        communicator.destroy()
    finally:
        sys.path.remove(str(SHAPE))
        sys.meta_path[:] = finders
        for name in [name for name in sys.modules if _is_theirs(name)]:
            del sys.modules[name]
        del os.environ["EP_A2A_BACKEND"]
        uninstall()


def aiter_kwargs(context: RankContext, **changes: Any) -> dict[str, Any]:
    """As AITER's guide makes them; gpu_per_node=1 as in its test."""
    num_experts = EXPERTS_PER_RANK * context.world_size
    case = Case(context.world_size, HIDDEN_DIM, TOPK, num_experts, MAX_TOKENS)
    kwargs = kwargs_of(case, context.rank, scale_dim=1, scale_type_size=4, gpu_per_node=1) | changes
    del kwargs["layout"]
    return kwargs


def round_trip(context: RankContext, op: Any, seed: int = 0) -> None:
    """AITER's calls of an op, with experts that return what they get."""
    tokens, weights, ids = own_tokens(context, seed)
    received, _, _, _, _ = op.dispatch(tokens, weights, None, ids)
    check_combined(context, tokens, ids, op.combine(received, None, ids))


def our_manager_by_the_setter(context: RankContext, backend: str) -> None:
    with shape(context, backend) as communicator:
        manager = install_manager(communicator)
        assert isinstance(communicator.all2all_manager, MoriHandles)
        assert communicator.all2all_manager is manager is install_manager(communicator)
        assert manager.backend == (backend or "ep_a2a")
        assert (manager.rank, manager.world_size) == (context.rank, context.world_size)
        assert not manager.internode
        op = manager.get_handle(aiter_kwargs(context))
        assert manager.get_handle(aiter_kwargs(context, gpu_per_node=context.world_size)) is op
        assert manager.get_handle(aiter_kwargs(context, low_latency=True)) is op
        assert manager.get_handle(aiter_kwargs(context), index=1) is not op
        assert op.native.config.kernel_type.name == "IntraNode"
        for seed in SITUATIONS:
            round_trip(context, op, seed)
        op.close()
        again = manager.get_handle(aiter_kwargs(context))
        assert again is not op
        round_trip(context, again, 0)
        communicator.destroy()
        with pytest.raises(ClosedError):
            manager.get_handle(aiter_kwargs(context))
        others = type(communicator)(context.group, context.device, None, "tp:0")
        with pytest.raises(UnsupportedError, match="expert-parallel"):
            install_manager(others)


def aiters_manager_on_our_mori(context: RankContext) -> None:
    """What AITER does by itself, in its shape: group, world, configuration and op by MORI's names."""
    with shape(context) as communicator:
        install()
        import mori

        # on a machine with GPUs a test on CPU must say so, and AITER's manager has no word for it
        on_cpu = mock.patch("torch.cuda.is_available", return_value=context.device.type == "cuda")
        try:
            with on_cpu:
                manager = communicator.all2all_manager
            op = manager.get_handle(aiter_kwargs(context))
            assert isinstance(op, mori.ops.EpDispatchCombineOp)
            assert manager.get_handle(aiter_kwargs(context)) is op
            round_trip(context, op)
        finally:
            mori.shmem.shmem_finalize()
            torch._C._distributed_c10d._unregister_process_group("mori")


def make_moe(context: RankContext, **changes: Any) -> Any:
    """ATOM's FusedMoEConfig of a layer in a deployment with one data-parallel rank per process."""
    moe, config = importlib.import_module("atom.model_ops.moe"), importlib.import_module("atom.config")
    config.current = config.Config(**changes)
    parallel = moe.FusedMoEParallelConfig(dp_size=context.world_size, use_ep=True, local_ep_size=1)
    return importlib.import_module("atom.model_ops.fused_moe.config").FusedMoEConfig(
        num_experts=EXPERTS_PER_RANK * context.world_size,
        experts_per_token=TOPK,
        hidden_dim=HIDDEN_DIM,
        num_local_experts=EXPERTS_PER_RANK,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=MAX_TOKENS,
    )


def make_kernel(context: RankContext, **changes: Any) -> Any:
    """A layer's modular kernel, made as ATOM makes it."""
    made = make_moe(context, **changes)
    layer = importlib.import_module("atom.model_ops.moe").FusedMoEMethodBase(made)
    kernels = importlib.import_module("atom.model_ops.fused_moe.modular_kernel")
    return kernels.FusedMoEModularKernel(layer.maybe_make_prepare_finalize())


def one_layer(context: RankContext, backend: str) -> None:
    """A layer's steps: rows that are cut off as ATOM cuts them, and what its expert kernel is told."""
    with shape(context, backend):
        assert activate()
        assert activate()
        kernel = make_kernel(context, enable_low_latency=True)
        ours = kernel.prepare_finalize
        assert (ours.num_dispatchers(), ours.max_num_tokens_per_rank()) == (context.world_size, MAX_TOKENS)
        assert ours.topk_indices_dtype() == torch.int32
        assert ours.output_is_reduced()
        assert ours.activation_format.name == "Standard"
        assert not ours.supports_async()
        for seed in SITUATIONS:
            x, weights, ids = own_tokens(context, seed)
            _, prepared = kernel._prepare(x, weights, ids, EXPERTS_PER_RANK * context.world_size, None, False, None)
            rows, scales, metadata, row_ids, row_weights = prepared()
            assert scales is None
            assert metadata.expert_num_tokens_cpu is None
            num_received = int(metadata.expert_num_tokens)
            assert ((row_ids[:num_received] // EXPERTS_PER_RANK) == context.rank).any(dim=1).all()
            assert row_weights.shape == row_ids.shape == (rows.shape[0], TOPK)
            _, finalized = kernel._finalize(None, rows[: max(1, num_received)].clone(), weights, ids, False)
            result = finalized()
            assert torch.equal(result.cpu(), expected_sums(x.cpu(), ids.cpu(), context.world_size))
        with pytest.raises(UnsupportedError, match="apply_router_weight_on_input"):
            kernel._prepare(x, weights, ids, 1, None, True, None)[1]()


def overlapped_halves(context: RankContext) -> None:
    """Two halves of a batch (TBO): both send before either receives."""
    with shape(context, "ep_a2a"):
        activate()
        kernel = make_kernel(context, enable_tbo=True)
        ubatching = importlib.import_module("atom.utils.tbo.ubatching")
        halves = [own_tokens(context, seed) for seed in range(2)]
        sent: list[Any] = []
        for ubatching.running, (x, weights, ids) in enumerate(halves):
            sent.append(kernel._prepare(x, weights, ids, 0, None, False, None))
        back: list[Any] = []
        for ubatching.running, (_, weights, ids) in enumerate(halves):
            wait, prepared = sent[ubatching.running]
            wait()
            back.append(kernel._finalize(None, prepared()[0].clone(), weights, ids, False))
        for (wait, finalized), (x, _, ids) in zip(back, halves):
            wait()
            assert torch.equal(finalized().cpu(), expected_sums(x.cpu(), ids.cpu(), context.world_size))
        ubatching.running = None
        assert not kernel.prepare_finalize.supports_async()


def without_the_switch(context: RankContext) -> None:
    """ATOM as it is; and with it, a layer that exchanges nothing."""
    with shape(context):
        assert not activate()
        install()  # for ATOM's question whether there is a mori
        with pytest.raises(NotImplementedError, match="ATOM would make MORI's here"):
            make_kernel(context)
    with shape(context, "ep_a2a"):
        activate()
        made = make_moe(context)
        made.moe_parallel_config.use_ep = False
        layer = importlib.import_module("atom.model_ops.moe").FusedMoEMethodBase(made)
        assert layer.maybe_make_prepare_finalize() is None
