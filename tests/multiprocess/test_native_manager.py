"""The ep_a2a backend's manager among real processes: handles, memory, nodes, and the end of it all."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a.errors import ConfigError, ConfigMismatchError, StateError, UnsupportedError
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.managers.registry import create_manager
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case, Step, run_step

CASE = Case(world_size=4, tokens=((4, 0, 7, 16), (0, 3, 1, 2)))


def create(context: RankContext) -> NativeAll2AllManager:
    manager = create_manager("ep_a2a", context.group)
    assert isinstance(manager, NativeAll2AllManager)
    manager.device = context.device
    return manager


def addresses_of(op: Any) -> set[int]:
    return set(op.memory.table.flatten().tolist()) - {0}


# --- handles and their memory ---


def handles(context: RankContext) -> None:
    manager = create(context)
    manager.topology()
    assert manager._arena is None
    kwargs = kwargs_of(CASE, context.rank)
    op = manager.get_handle(kwargs)
    assert type(op) is EpDispatchCombineOp
    assert op.arena is manager.arena
    # another way to say the same must not build a second op on the memory of the first
    assert manager.get_handle(dict(reversed(list(kwargs.items())))) is op
    assert manager.get_handle({**kwargs, "layout": "compact"}) is op
    second = manager.get_handle(kwargs, 1)
    assert not addresses_of(op) & addresses_of(second)
    wide = manager.get_handle(kwargs_of(replace(CASE, topk=3), context.rank))
    assert len({op, second, wide}) == 3
    with pytest.raises(StateError):
        manager.device = "cpu"
    # steps of different indices may overlap, steps of one index follow each other
    first = Step.dispatch(CASE, op, 0, context.device)
    overlapping = Step.dispatch(replace(CASE, seed=5), second, 1, context.device)
    first.check_dispatched()
    overlapping.check_dispatched()
    overlapping.combine()
    first.combine()
    run_step(replace(CASE, topk=3), wide, 0, context.device)
    manager.destroy()


def test_handles(ranks):
    ranks(handles, 4)


def same_kwargs_same_addresses(context: RankContext) -> None:
    """A handle that was dropped and is asked for again lies where it lay: captured graphs hold raw addresses."""
    with create(context) as manager:
        op = manager.get_handle(kwargs_of(CASE, context.rank))
        run_step(CASE, op, 0, context.device)
        table, num_bytes = op.memory.table.clone(), manager.arena.num_bytes
        del op
        gc.collect()
        assert len(manager.handle_cache) == 0
        again = manager.get_handle(kwargs_of(CASE, context.rank))
        run_step(CASE, again, 1, context.device)
        assert torch.equal(again.memory.table, table)
        assert manager.arena.num_bytes == num_bytes


def test_a_handle_asked_for_again_has_the_same_addresses(ranks):
    ranks(same_kwargs_same_addresses, 4)


def ranks_that_differ(context: RankContext) -> None:
    found = r"the same hidden_dim on all ranks; got 64 on ranks \[0, 1, 3\]; 128 on ranks \[2\]"
    with create(context) as manager:
        hidden = 64 if context.rank != 2 else 128
        with pytest.raises(ConfigMismatchError, match=found):
            manager.get_handle(kwargs_of(CASE, context.rank, token_hidden_size=hidden))
        assert len(manager.handle_cache) == 0
        run_step(CASE, manager.get_handle(kwargs_of(CASE, context.rank)), 0, context.device)


def test_ranks_that_ask_for_different_handles(ranks):
    ranks(ranks_that_differ, 4)


# --- nodes ---


def ask_for_virtual_nodes(context: RankContext) -> None:
    with create(context) as manager:
        with pytest.raises(UnsupportedError, match=r"equally many ranks.*gpu_per_node=3.*allgather_reducescatter"):
            manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=3))
        with pytest.raises(ConfigError):
            manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=0))
        assert manager._arena is None
        assert len(manager.handle_cache) == 0
        # a node may be larger than the group
        for gpu_per_node in (4, 8):
            op = manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=gpu_per_node))
            run_step(CASE, op, 0, context.device)


def test_uneven_nodes_are_refused_with_a_way_out(ranks):
    ranks(ask_for_virtual_nodes, 4)


# --- the end ---


def without_global_rank_0(context: RankContext) -> Any:
    group = dist.new_group([1, 2, 3])
    if context.rank == 0:
        return None
    case = replace(CASE, world_size=3, num_experts=6, tokens=((4, 0, 7),))
    with create_manager("ep_a2a", group) as manager:
        manager.device = context.device
        run_step(case, manager.get_handle(kwargs_of(case, context.rank - 1)), 0, context.device)
        answer = manager.rank, manager.world_size
    dist.destroy_process_group(group)
    return answer


def test_a_group_without_global_rank_0(ranks):
    assert ranks(without_global_rank_0, 4) == [None, (0, 3), (1, 3), (2, 3)]


# --- chosen by name ---


def chosen_by_environment(context: RankContext, name: str | None) -> str:
    """EP_A2A_BACKEND, as an engine's launcher sets it; the manager runs a layer whatever its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EP_A2A_CONFIG", raising=False)
        patch.delenv("EP_A2A_BACKEND", raising=False)
        if name is not None:
            patch.setenv("EP_A2A_BACKEND", name)
        try:
            ep_a2a.init_dist_env(1, 0, "gloo", data_parallel_size=4, data_parallel_rank=context.rank)
            manager = ep_a2a.get_ep_group().device_communicator.all2all_manager
            run_step(CASE, manager.get_handle(kwargs_of(CASE, context.rank)), 0, context.device)
            return type(manager).__name__
        finally:
            ep_a2a.destroy_dist_env()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, "NativeAll2AllManager"),
        ("ep_a2a", "NativeAll2AllManager"),
        ("naive", "NaiveAll2AllManager"),
        ("allgather_reducescatter", "AllGatherReduceScatterAll2AllManager"),
    ],
)
def test_the_environment_chooses_the_backend(ranks, name, expected):
    assert ranks(chosen_by_environment, 4, name) == [expected] * 4
