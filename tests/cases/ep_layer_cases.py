"""Bodies of two tests: steps of AITER's layer on all ranks, through the EP group's manager and by the direct API.

Every rank brings tokens, quantised before dispatch or inside it. tests/unit/test_reference.py shows that what the
oracle says of dispatch and combine makes up a dense MoE layer.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

import ep_a2a
from ep_a2a import shmem
from ep_a2a.config import FP8_DTYPE, num_owned_experts
from ep_a2a.errors import ClosedError, NotInitializedError
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case, run_step

GROUP_NAME = "ep_a2a_test_default"
CASTS = {"per_Token": "fp8_per_token", "per_128x128": "fp8_per_1x128"}
"""quant_type of a fused cast, by AITER's name; per_128x128 means 1x128 for activations."""


def layer(
    world_size: int,
    quantisation: str,
    *,
    fused: bool = False,
    hidden_dim: int = 6144,
    max_tokens: int = 128,
    layout: str = "compact",
) -> Case:
    """AITER's layer: E = 16, top-2. All ranks bring the most they may; then fewer, and the last one nothing."""
    fewer = (*(max(1, max_tokens - 3 * rank - 1) for rank in range(world_size - 1)), 0)
    case = Case(
        world_size=world_size,
        hidden_dim=hidden_dim,
        num_experts=16,
        max_tokens=max_tokens,
        tokens=((max_tokens,), fewer),
        layout=layout,
    )
    if quantisation == "none":
        return case
    if fused:
        return replace(case, quant_type=CASTS[quantisation])
    return replace(case, dtype=FP8_DTYPE, scale_dim=1 if quantisation == "per_Token" else hidden_dim // 128)


def handle_kwargs(case: Case, rank: int) -> dict[str, Any]:
    """AITER's handle kwargs; our own only where they say something."""
    kwargs = kwargs_of(
        case,
        rank,
        input_dtype=torch.bfloat16,
        quant_dtype=case.dtype if case.cast == "none" else FP8_DTYPE,
        scale_dim=case.scale_dim,
        scale_type_size=case.scale_dtype.itemsize if case.scale_dim else 0,
        num_local_experts=num_owned_experts(case.num_experts, case.world_size, rank),
        gpu_per_node=case.world_size,
    )
    own = {"quant_type": case.quant_type, "num_experts": case.num_experts}
    used = {"quant_type": case.cast != "none", "num_experts": case.num_experts % case.world_size != 0}
    return kwargs | {name: value for name, value in own.items() if used[name]}


def through_the_manager(context: RankContext, case: Case) -> None:
    """A program on the EP group, with checks: init_dist_env, its manager, a handle, steps, and the end."""
    ep_a2a.init_dist_env(
        tensor_model_parallel_size=1,
        rankID=0,
        backend="gloo" if context.device.type == "cpu" else "cpu:gloo,cuda:nccl",
        local_rank=-1 if context.device.index is None else context.device.index,
        data_parallel_size=case.world_size,
        data_parallel_rank=context.rank,
        all2all_backend="ep_a2a",
    )
    try:
        group = ep_a2a.get_ep_group()
        assert (group.world_size, group.rank_in_group, group.device) == (case.world_size, context.rank, context.device)
        manager = group.device_communicator.all2all_manager
        assert manager.explain()["kernel"] == "IntraNode"
        kwargs = handle_kwargs(case, context.rank)
        op = manager.get_handle(kwargs)
        assert manager.get_handle(dict(kwargs)) is op
        for number in range(case.num_steps):
            run_step(case, op, number, context.device)
    finally:
        ep_a2a.destroy_dist_env()
    with pytest.raises(ClosedError):
        op.check()
    with pytest.raises(NotInitializedError):
        ep_a2a.get_ep_group()


def by_the_direct_api(context: RankContext, case: Case) -> None:
    """A program on the op itself, with checks: shmem from a registered group, config, op, steps, shmem_finalize."""
    torch._C._distributed_c10d._register_process_group(GROUP_NAME, context.group)
    try:
        # without a device the current GPU is taken, as MORI does
        shmem.shmem_torch_process_group_init(GROUP_NAME, "cpu" if context.device.type == "cpu" else None)
        assert (shmem.shmem_mype(), shmem.shmem_npes()) == (context.rank, case.world_size)
        op = EpDispatchCombineOp(case.config(context.rank))
        for number in range(case.num_steps):
            run_step(case, op, number, context.device)
        shmem.shmem_finalize()
        with pytest.raises(ClosedError):
            op.check()
    finally:
        shmem.shmem_finalize()
        torch._C._distributed_c10d._unregister_process_group(GROUP_NAME)
