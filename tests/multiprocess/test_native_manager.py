"""The ep_a2a backend's manager among real processes: handles, memory, and nodes."""

from dataclasses import replace
from typing import Any

import pytest

from ep_a2a.errors import ConfigError, StateError, UnsupportedError
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
