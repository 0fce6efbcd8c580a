"""What `ep-a2a plan` says is what ops allocate, to the byte: built among real processes."""

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ep_a2a import autograd
from ep_a2a.commands.plan.model import model_of
from ep_a2a.commands.plan.sizes import for_training, plan_of
from ep_a2a.commands.plan.vllm import VllmOptions, vllm_plan
from ep_a2a.config import num_owned_experts
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.integrations.token_format import LayerShape, TokenFormat, handle_kwargs
from ep_a2a.testing import RankContext
from tests.cases import manager_cases
from tests.cases.op_cases import Case
from tests.cases.tables import read_table

WORLD_SIZE, HIDDEN_DIM, TOPK, NUM_EXPERTS, MAX_TOKENS = 2, 256, 3, 129, 150
CASES = read_table("configs")["planned"]
"""Experts are uneven, and so many that a rank with one more has a larger local block."""
MODEL = {
    "n_routed_experts": 9,
    "num_experts_per_tok": 2,
    "hidden_size": 256,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def kwargs_of(rank: int, **changes: Any) -> dict[str, Any]:
    case = Case(WORLD_SIZE, HIDDEN_DIM, TOPK, NUM_EXPERTS, MAX_TOKENS)
    own = {"num_experts": NUM_EXPERTS, "num_local_experts": num_owned_experts(NUM_EXPERTS, WORLD_SIZE, rank)}
    return manager_cases.kwargs_of(case, rank, **own, **changes)


def allocated(context: RankContext) -> dict[str, tuple[int, int]]:
    """By case: bytes that the arena has for the op, and those of what is allocated when first asked for."""
    found = {}
    for name, changes in CASES.items():
        with manager_cases.create("ep_a2a", context) as manager:
            op = manager.get_handle(kwargs_of(context.rank, **changes))
            built = manager.arena.num_bytes
            op.get_registered_combine_input_buffer(op.config.combined_dtype)
            found[name] = (built, manager.arena.num_bytes - built)
    return found


def test_ops_allocate_what_is_planned(ranks):
    found = ranks(allocated, WORLD_SIZE)
    for name, changes in CASES.items():
        configs = [config_from_handle_kwargs(kwargs_of(r, **changes), topology_internode=False) for r in range(2)]
        plan = plan_of(configs)
        assert plan.bytes_by_rank == tuple(each[name][0] for each in found), name
        assert plan.later[0].num_bytes == found[0][name][1], name


def copied(context: RankContext) -> int:
    """Bytes that a combine of dispatch's own rows and weights allocates."""
    with manager_cases.create("ep_a2a", context) as manager:
        op = manager.get_handle(kwargs_of(context.rank, max_num_tokens_per_dp_rank=9))
        ids = torch.arange(2 * TOPK, dtype=torch.int32).reshape(2, TOPK)
        rows, weights, *_ = op.dispatch(torch.ones(2, HIDDEN_DIM, dtype=torch.bfloat16), torch.ones(2, TOPK), None, ids)
        before = manager.arena.num_bytes
        op.combine(rows, weights, ids)
        return int(manager.arena.num_bytes - before)


def test_copies_are_planned(ranks):
    changes = {"max_num_tokens_per_dp_rank": 9}
    plan = plan_of([config_from_handle_kwargs(kwargs_of(r, **changes), topology_internode=False) for r in range(2)])
    assert ranks(copied, WORLD_SIZE) == [sum(part.num_bytes for part in plan.later[1:])] * 2


def trained(context: RankContext) -> dict[str, int]:
    """Bytes that a layer of ep_a2a.autograd keeps, by what they are; it allocates none of the op's."""
    with manager_cases.create("ep_a2a", context) as manager:
        op = manager.get_handle(kwargs_of(context.rank, max_num_tokens_per_dp_rank=9))
        before = manager.arena.num_bytes
        ids = torch.arange(9 * TOPK, dtype=torch.int32).reshape(9, TOPK)
        tokens, weights = torch.ones(9, HIDDEN_DIM, dtype=torch.bfloat16, requires_grad=True), torch.ones(9, TOPK)
        weights.requires_grad_()
        scale = torch.ones(HIDDEN_DIM, dtype=torch.bfloat16, requires_grad=True)
        kept: list[autograd.Received] = []

        def layer(tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            received = autograd.dispatch(op, tokens, weights, ids)
            assert received.weights is not None
            kept[:] = [received]
            return autograd.combine(op, (received.rows * received.weights[:, :1]).to(torch.bfloat16), received)

        def grouped(tokens: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            received = autograd.dispatch(op, tokens, weights, ids)
            groups = autograd.group(op, received)
            return autograd.combine(op, autograd.ungroup(groups.rows * scale, groups, received), received)

        with Made() as made:
            result = grouped(tokens, weights, ids)
        with_group = made.num_bytes() - result.nbytes + ids.nbytes - 4  # but for the number of rows
        result.sum().backward()
        with Made() as made:
            result = layer(tokens, weights, ids)
        sides = kept[0].weights.nbytes + kept[0].ids.nbytes
        received = kept[0].rows.nbytes, sides
        assert made.num_bytes() == result.nbytes + sum(received) + kept[0].num_rows.nbytes
        result.sum().backward()
        with Made() as made:
            result = checkpoint(layer, tokens, weights, ids, use_reentrant=False)
        kept.clear()
        assert made.num_bytes() == result.nbytes
        result.sum().backward()
        assert manager.arena.num_bytes == before
        given = tokens.nbytes + weights.nbytes + ids.nbytes
        return dict(zip(KEPT, (*received, ids.nbytes, given, with_group), strict=True))


class Made(TorchDispatchMode):
    """Counts the bytes that operators allocate, and that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in results if isinstance(results, tuple | list) else (results,):
            storage = each.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def num_bytes(self) -> int:
        gc.collect()
        return sum(num_bytes for storage, num_bytes in self._storages.values() if not storage.expired())


KEPT = ("received_rows", "received_weights_and_ids", "ids", "in_a_checkpoint", "with_group")


def test_what_training_keeps_is_planned(ranks):
    changes = {"max_num_tokens_per_dp_rank": 9}
    plan = plan_of([config_from_handle_kwargs(kwargs_of(r, **changes), topology_internode=False) for r in range(2)])
    assert ranks(trained, WORLD_SIZE) == [for_training(plan).kept] * 2


def bytes_of_layer(context: RankContext, cast: str, max_tokens: int, nodes: dict[str, Any]) -> int:
    """Bytes that the op of a vLLM layer takes, with scales as vLLM rounds them on some GPUs."""
    with manager_cases.create("ep_a2a", context) as manager:
        kwargs = handle_kwargs(
            TokenFormat(cast, "float32" if cast == "none" else "float32_power_of_two"),
            LayerShape(
                dtype=torch.bfloat16,
                hidden_dim=256,
                topk=2,
                num_experts=9,
                num_local_experts=num_owned_experts(9, context.world_size, context.rank),
                max_tokens=max_tokens,
            ),
            rank=context.rank,
            world_size=context.world_size,
        )
        op = manager.get_handle(nodes | kwargs)
        assert op.config.internode_transport == nodes.get("internode_transport", "auto")
        return int(manager.num_buffer_bytes)


# more than 512 tokens have another kernel between nodes; between virtual nodes of one host the default is peer_memory
@pytest.mark.parametrize(
    ("num_nodes", "cast", "max_tokens"), [(1, "fp8_per_1x128", 200), (2, "fp8_per_1x128", 200), (2, "none", 600)]
)
def test_vllms_op_allocates_what_is_planned(ranks, num_nodes, cast, max_tokens):
    nodes = {"gpu_per_node": 2, "internode_transport": "torch.distributed"} if num_nodes > 1 else {}
    quantization = MODEL["quantization_config"] if cast != "none" else None
    model = model_of({**MODEL, "quantization_config": quantization})
    plan = vllm_plan(
        model, VllmOptions(data_parallel_size=2 * num_nodes, gpus_per_node=2, max_num_batched_tokens=max_tokens)
    )
    assert tuple(ranks(bytes_of_layer, 2 * num_nodes, cast, max_tokens, nodes)) == plan.bytes_by_rank
    assert sum(part.num_bytes for part in plan.parts) == plan.bytes_by_rank[0]
