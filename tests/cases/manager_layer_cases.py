"""One MoE layer on a manager's own dispatch and combine, the same code for every backend; run on every rank."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ep_a2a import errors
from ep_a2a.config import FP8_DTYPE, num_owned_experts
from ep_a2a.memory.guards import recording_on_cpu
from ep_a2a.testing import RankContext
from tests.cases import manager_cases
from tests.cases.manager_cases import create
from tests.cases.op_cases import Case, same_bits

HIDDEN_DIM, TOPK, NUM_EXPERTS, MAX_TOKENS = 64, 3, 10, 8
TOKENS_PER_STEP = ((5, 0, 3, 1), (8, 8, 8, 8), (0, 0, 0, 0), (0, 7, 0, 2), (2, 3, 1, 0))
TO_RANK_0 = len(TOKENS_PER_STEP) - 1
"""A step whose tokens all name expert 0: other ranks receive nothing."""


def inputs_of(rank: int, number: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Hidden states, weights and ids of a rank in a step; some ids are dropped slots."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    num_tokens = TOKENS_PER_STEP[number][rank]
    hidden = torch.randn(num_tokens, HIDDEN_DIM, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, NUM_EXPERTS + 2, generator=generator).argsort(1)[:, :TOPK] - 1
    ids = ids.clamp(max=0) if number == TO_RANK_0 else ids
    return hidden, torch.rand(num_tokens, TOPK, generator=generator), ids


def extras_of(rank: int, number: int) -> list[torch.Tensor]:
    """More tensors of a rank's tokens, which backends that gather all tokens take along."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    num_tokens = TOKENS_PER_STEP[number][rank]
    cube = torch.randn(num_tokens, 2, 3, generator=generator).to(FP8_DTYPE)
    return [torch.rand(num_tokens, generator=generator) > 0.5, cube]


def owned_experts(world_size: int, rank: int) -> range:
    first = sum(num_owned_experts(NUM_EXPERTS, world_size, each) for each in range(rank))
    return range(first, first + num_owned_experts(NUM_EXPERTS, world_size, rank))


def run_experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, owned: range) -> torch.Tensor:
    """The weighted sum of some experts' results, [N, H]: expert e multiplies by e + 1 and adds e."""
    mine = (ids >= owned.start) & (ids < owned.stop)
    rows = hidden.float()[:, None] * (ids[:, :, None] + 1) + ids[:, :, None]
    return (rows * (weights.float() * mine)[:, :, None]).sum(1).to(returned_dtype(hidden.dtype))


def returned_dtype(dtype: torch.dtype) -> torch.dtype:
    """What experts return for tokens of a dtype."""
    return torch.bfloat16 if dtype == FP8_DTYPE else dtype


def layer_result(world_size: int, rank: int, number: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What combine must return: every rank's rounded rows, added in float32 in rank order, rounded once."""
    inputs = inputs_of(rank, number, dtype)
    total = torch.zeros(len(inputs[0]), HIDDEN_DIM)
    for owner in range(world_size):
        total += run_experts(*inputs, owned_experts(world_size, owner))
    return total.to(returned_dtype(dtype))


def kwargs_of(context: RankContext, **changes: Any) -> dict[str, Any]:
    own = {"num_local_experts": len(owned_experts(context.world_size, context.rank)), "num_experts": NUM_EXPERTS}
    case = Case(context.world_size, HIDDEN_DIM, TOPK, NUM_EXPERTS, MAX_TOKENS)
    return manager_cases.kwargs_of(case, context.rank, **{"quant_dtype": None, **own, **changes})


def run_layer(
    context: RankContext,
    place: Any,
    backend: str,
    number: int,
    *,
    one_node: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """One step by `place`'s dispatch and combine, a manager's or a communicator's, against layer_result.

    All-reduce adds in an order of its own, and nodes add their ranks' rows and round the sums before they travel.
    """
    given = [tensor.to(context.device) for tensor in inputs_of(context.rank, number, dtype)]
    if backend == "ep_a2a":
        dispatched = place.dispatch(*given)
    else:
        *tensors, extras = place.dispatch(
            *given, False, [each.to(context.device) for each in extras_of(context.rank, number)]
        )
        dispatched = [*tensors, *extras]
    check_rows(context, backend, dispatched, number, dtype)
    returned = run_experts(*dispatched[:3], owned_experts(context.world_size, context.rank))
    kept = returned.clone()
    result = place.combine(returned)
    assert torch.equal(returned, kept)
    expected = layer_result(context.world_size, context.rank, number, dtype)
    if backend == "naive" or not one_node:
        torch.testing.assert_close(result.cpu(), expected, rtol=2**-6, atol=2**-3)
    else:
        same_bits(result, expected, "combined")


def check_rows(
    context: RankContext, backend: str, dispatched: Any, number: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """The rows for this rank's experts came, or all, in the order of (source rank, source token)."""
    parts = [(*inputs_of(rank, number, dtype), *extras_of(rank, number)) for rank in range(context.world_size)]
    everything = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    owned = owned_experts(context.world_size, context.rank)
    comes = ((everything[2] >= owned.start) & (everything[2] < owned.stop)).any(1) | (backend != "ep_a2a")
    for got, tensor in zip(dispatched, everything):
        same_bits(got, tensor[comes], "dispatched")


def layer_on_a_manager(
    context: RankContext, backend: str, changes: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    with create(backend, context) as manager:
        op = manager.get_handle(kwargs_of(context, **changes))
        for number in range(len(TOKENS_PER_STEP)):
            run_layer(context, manager, backend, number, one_node="gpu_per_node" not in changes, dtype=dtype)
        assert not op.has_open_step


def in_a_group_without_rank_0(context: RankContext, backend: str) -> None:
    """In a group of all ranks but the first, whose store the first rank's process may host."""
    group = dist.new_group(list(range(1, context.world_size)))
    if context.rank:
        inner = RankContext(context.rank - 1, context.world_size - 1, context.device, group)
        layer_on_a_manager(inner, backend, {})
        dist.destroy_process_group(group)
    dist.barrier()


def over_a_group_with_gloo_only(context: RankContext, backend: str) -> None:
    """As vLLM's cpu_group is: CUDA tensors need a communicator that the manager makes."""
    group = dist.new_group(backend="gloo")
    inner = RankContext(context.rank, context.world_size, context.device, group)
    # a second manager of the same group makes its own
    for dtype in (torch.float32, torch.bfloat16):
        layer_on_a_manager(inner, backend, {}, dtype)
    dist.destroy_process_group(group)


def needs_a_living_handle(context: RankContext) -> None:
    """The op that dispatch is told, or the only one that lives; of several it takes none by itself."""
    with create("ep_a2a", context) as manager:
        hidden, weights, ids = inputs_of(context.rank, 0)
        with pytest.raises(errors.StateError, match="get_handle"):
            manager.dispatch(hidden, weights, ids)
        manager.reset()
        first = manager.get_handle(kwargs_of(context))
        wide = manager.get_handle(kwargs_of(context, token_hidden_size=2 * HIDDEN_DIM))
        with pytest.raises(errors.StateError, match=r"2 living ops.*dispatch\(\.\.\., handle=op\)"):
            manager.dispatch(hidden, weights, ids)
        with pytest.raises(errors.HiddenSizeError):
            manager.dispatch(hidden, weights, ids, handle=wide)
        with pytest.raises(errors.StateError, match="one of another manager"):
            manager.dispatch(hidden, weights, ids, handle=manager)
        manager.combine(torch.zeros_like(manager.dispatch(hidden, weights, ids, handle=first)[0]))
        manager.reset()
        del wide
        run_layer(context, manager, "ep_a2a", 1)
        # the op of a step lives until combine, whoever drops it
        dispatched = manager.dispatch(hidden, weights, ids)
        del first
        manager.combine(torch.zeros_like(dispatched[0]))
        with pytest.raises(errors.StateError, match="get_handle"):
            manager.dispatch(hidden, weights, ids)


def steps_that_fail(context: RankContext) -> None:
    with create("ep_a2a", context) as manager:
        op = manager.get_handle(kwargs_of(context))
        hidden, weights, ids = inputs_of(context.rank, 1)
        with pytest.raises(errors.AlternationError):
            manager.combine(hidden)
        rows = manager.dispatch(hidden, weights, ids)[0]
        with pytest.raises(errors.AlternationError, match=r"manager\.reset"):
            manager.dispatch(hidden, weights, ids)
        with pytest.raises(errors.ShapeError):
            manager.combine(rows.new_zeros(len(rows) + 1, HIDDEN_DIM))
        with pytest.raises(errors.DtypeError):
            manager.combine(rows.float())
        # what combine refuses can be repeated, and combine_into_output ends a step, too
        with pytest.raises(errors.ShapeError, match="output of shape"):
            manager.combine_into_output(rows, torch.ones(len(hidden) + 1, HIDDEN_DIM))
        output = torch.ones(len(hidden), HIDDEN_DIM, dtype=torch.float32)
        assert manager.combine_into_output(torch.zeros_like(rows), output) is output
        assert not output.any()
        run_layer(context, manager, "ep_a2a", 1)
        # an exception between dispatch and combine
        manager.dispatch(hidden, weights, ids)
        manager.reset()
        run_layer(context, manager, "ep_a2a", 3)
        # a rank is a layer ahead
        with pytest.raises(errors.ConfigMismatchError, match="rank 0: tag 7, rank 1: tag 8"):
            manager.dispatch(hidden, weights, ids, tag=7 + min(context.rank, 1))
        manager.reset()
        run_layer(context, manager, "ep_a2a", 3)
        # the op's own calls share its order of calls
        op.dispatch(hidden, weights, None, ids.int())
        with pytest.raises(errors.AlternationError):
            manager.dispatch(hidden, weights, ids)
        op.reset()
        manager.dispatch(hidden, weights, ids)
        op.reset()
        run_layer(context, manager, "ep_a2a", 1)

        small = manager.get_handle(kwargs_of(context, max_total_recv_tokens=context.world_size))
        # only rank 0 has too many rows; the others may learn of it later
        with pytest.raises(errors.CapacityError) if context.rank == 0 else contextlib.suppress(errors.EpA2AError):
            manager.dispatch(hidden, weights, torch.zeros_like(ids), handle=small)
        manager.reset()
        assert not small.has_open_step
        few, none = hidden[:0], weights[:0]
        manager.combine(manager.dispatch(few, none, ids[:0], handle=small)[0])


def what_is_refused(context: RankContext) -> None:
    with create("ep_a2a", context) as manager:
        hidden, weights, ids = inputs_of(context.rank, 1)
        op = manager.get_handle(kwargs_of(context))
        for call in (
            lambda: manager.dispatch(hidden, torch.zeros(len(hidden), NUM_EXPERTS)),
            lambda: manager.dispatch(hidden, torch.zeros(len(hidden), NUM_EXPERTS), True),
            lambda: manager.dispatch_router_logits(hidden, torch.zeros(len(hidden), NUM_EXPERTS)),
        ):
            with pytest.raises(
                errors.UnsupportedError, match=r"dispatch_router_logits.*Use naive or allgather_reducescatter"
            ):
                call()
        with pytest.raises(errors.UnsupportedError, match=r"extra_tensors.*allgather_reducescatter"):
            manager.dispatch(hidden, weights, ids, extra_tensors=[hidden])
        with recording_on_cpu(), pytest.raises(errors.UnsupportedError, match="capture"):
            manager.dispatch(hidden, weights, ids)
        casting = manager.get_handle(kwargs_of(context, quant_dtype=FP8_DTYPE, quant_type="fp8_per_token"))
        with pytest.raises(errors.UnsupportedError, match="fp8_per_token"):
            manager.dispatch(hidden, weights, ids, handle=casting)
        by_expert = manager.get_handle(kwargs_of(context, layout="expert_major"))
        with pytest.raises(errors.UnsupportedError, match="expert_major"):
            manager.dispatch(hidden, weights, ids, handle=by_expert)
        assert not any(each.has_open_step for each in (op, casting, by_expert))
        assert len(manager.get_handle(kwargs_of(context)).dispatch(hidden, weights, None, ids.int())) == 5


def other_forms(context: RankContext) -> None:
    """Strided tensors, weights of another dtype, no and empty extra tensors, and scales that travel with fp8 tokens."""
    with create("ep_a2a", context) as manager:
        op = manager.get_handle(kwargs_of(context))
        hidden, weights, ids = inputs_of(context.rank, 1)
        far = torch.where(ids < 0, torch.full_like(ids, 1 << 40), ids)
        got = manager.dispatch(hidden.T.contiguous().T, weights.bfloat16(), far, True, [])
        assert (len(got), got[3], got[1].dtype, got[2].dtype) == (4, [], torch.bfloat16, torch.int64)
        same_bits(manager.combine(torch.zeros_like(got[0])), torch.zeros_like(hidden), "combined")
        scaled = manager.get_handle(kwargs_of(context, quant_dtype=FP8_DTYPE, scale_dim=4, scale_type_size=4))
        parts = [inputs_of(rank, 1, FP8_DTYPE) for rank in range(context.world_size)]
        scales = [
            torch.arange(4.0) + 100 * rank + torch.arange(len(part[0]))[:, None] for rank, part in enumerate(parts)
        ]
        tokens, weights, ids = parts[context.rank]
        *dispatched, extra = manager.dispatch(tokens, weights, ids, False, [scales[context.rank]], handle=scaled)
        everything = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        owned = owned_experts(context.world_size, context.rank)
        comes = ((everything[2] >= owned.start) & (everything[2] < owned.stop)).any(1)
        for mine, tensor in zip((*dispatched, *extra), (*everything, torch.cat(scales)), strict=True):
            same_bits(mine, tensor[comes], "dispatched")
        manager.combine(torch.zeros(len(dispatched[0]), HIDDEN_DIM, dtype=torch.bfloat16))
        assert not op.has_open_step
        assert not scaled.has_open_step
