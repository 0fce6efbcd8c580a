"""What a layer of ep_a2a.autograd keeps from forward to backward; it allocates none of the op's memory."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ep_a2a import autograd
from ep_a2a.testing import RankContext
from tests.cases import manager_cases
from tests.cases.op_cases import Case

CASE = Case(world_size=2, hidden_dim=256, topk=3, num_experts=8, max_tokens=9)
ROW_BYTES, WEIGHT_BYTES, COUNT_BYTES = CASE.hidden_dim * 2, 4, 4
"""Of a row in bf16, of a slot's weight, of the number of rows."""
SORTING_BYTES = 3 * 8 + 4 + 2
"""Of each slot that `group` sorts: its place, row and weight, the place's slot, and whether each of the two has one."""
NUM_ROWS = CASE.world_size * CASE.max_tokens


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


def kept(context: RankContext) -> list[int]:
    """Bytes that are held between forward and backward beside the result: plain, in a checkpoint, with group."""
    with manager_cases.create("ep_a2a", context) as manager:
        op = manager.get_handle(manager_cases.kwargs_of(CASE, context.rank))
        before = manager.arena.num_bytes
        ids = torch.arange(CASE.max_tokens * CASE.topk, dtype=torch.int32).reshape(-1, CASE.topk) % CASE.num_experts
        tokens = torch.ones(CASE.max_tokens, CASE.hidden_dim, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.ones(CASE.max_tokens, CASE.topk, requires_grad=True)
        scale = torch.ones(CASE.hidden_dim, dtype=torch.bfloat16, requires_grad=True)

        def plain(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            received = autograd.dispatch(op, tokens, weights, ids)
            assert received.weights is not None
            return autograd.combine(op, (received.rows * received.weights[:, :1]).to(torch.bfloat16), received)

        def in_a_checkpoint(tokens: torch.Tensor, weights: torch.Tensor) -> Any:
            return checkpoint(plain, tokens, weights, use_reentrant=False)

        def with_group(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            received = autograd.dispatch(op, tokens, weights, ids)
            groups = autograd.group(op, received)
            return autograd.combine(op, autograd.ungroup(groups.rows * scale, groups, received), received)

        def held(layer: Callable[..., torch.Tensor]) -> int:
            with Made() as made:
                result = layer(tokens, weights)
            num_bytes = made.num_bytes() - result.nbytes
            result.sum().backward()
            return num_bytes

        found = [held(layer) for layer in (plain, in_a_checkpoint, with_group)]
        assert manager.arena.num_bytes == before
        return found


def test_what_training_keeps(ranks: Any) -> None:
    received = NUM_ROWS * (ROW_BYTES + CASE.topk * WEIGHT_BYTES) + COUNT_BYTES
    grouped = NUM_ROWS * CASE.topk * (2 * ROW_BYTES + SORTING_BYTES) + COUNT_BYTES
    assert ranks(kept, 2) == [[received, 0, grouped]] * 2
