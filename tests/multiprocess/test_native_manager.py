"""The ep_a2a backend's manager among real processes: handles, memory, nodes, and the end of it all."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import ep_a2a
from ep_a2a.errors import (
    ClosedError,
    ConfigError,
    ConfigMismatchError,
    EpA2AError,
    StateError,
    UnknownNameError,
    UnsupportedError,
)
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.managers.registry import create_manager
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.tuning.policy import FLAG_PROGRAMS, Phase
from tests.cases.manager_cases import kwargs_of
from tests.cases.op_cases import Case, Step, make_inputs, run_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.testing import RankContext

CASE = Case(world_size=4, tokens=((4, 0, 7, 16), (0, 3, 1, 2)))


def create(context: RankContext) -> NativeAll2AllManager:
    manager = create_manager("ep_a2a", context.group)
    assert isinstance(manager, NativeAll2AllManager)
    manager.device = context.device
    return manager


def error_of(work: Callable[[], Any]) -> tuple[type[EpA2AError], str] | None:
    try:
        work()
    except EpA2AError as error:
        return type(error), str(error)
    return None


def addresses_of(op: Any) -> list[int]:
    return op.memory.table.flatten().tolist()


# --- handles and their memory ---


def handles(context: RankContext) -> dict[str, Any]:
    manager = create(context)
    seen: dict[str, Any] = {"arena before": manager._arena is not None}
    manager.topology()
    seen["arena after asking for the topology"] = manager._arena is not None
    kwargs = kwargs_of(CASE, context.rank)
    op = manager.get_handle(kwargs)
    seen["kind"] = type(op) is EpDispatchCombineOp
    seen["arena after"] = manager._arena is not None and op.arena is manager.arena
    seen["same"] = manager.get_handle(dict(reversed(list(kwargs.items())))) is op
    second = manager.get_handle(kwargs, 1)
    # another way to say the same must not build a second op on the memory of the first
    seen["other words"] = manager.get_handle({**kwargs, "layout": "compact"}) is op
    seen["another index"] = second is not op
    own, other = set(addresses_of(op)) - {0}, set(addresses_of(second)) - {0}
    seen["memory apart"] = not own & other
    wide = manager.get_handle(kwargs_of(replace(CASE, topk=3), context.rank))
    seen["other kwargs"] = wide is not op
    seen["device"] = error_of(lambda: setattr(manager, "device", "cpu"))
    # steps of different indices may overlap, steps of one index follow each other
    first = Step.dispatch(CASE, op, 0, context.device)
    overlapping = Step.dispatch(replace(CASE, seed=5), second, 1, context.device)
    first.check_dispatched()
    overlapping.check_dispatched()
    overlapping.combine()
    first.combine()
    run_step(replace(CASE, topk=3), wide, 0, context.device)
    manager.destroy()
    return seen


def test_handles(ranks):
    for seen in ranks(handles, 4):
        assert seen.pop("device")[0] is StateError
        assert not seen.pop("arena before")
        assert not seen.pop("arena after asking for the topology")
        assert seen == dict.fromkeys(seen, True)


def same_kwargs_same_addresses(context: RankContext) -> tuple[bool, bool, int]:
    """A handle that was dropped and is asked for again lies where it lay: captured graphs hold raw addresses."""
    with create(context) as manager:
        op = manager.get_handle(kwargs_of(CASE, context.rank))
        run_step(CASE, op, 0, context.device)
        table, num_bytes = op.memory.table.clone(), manager.arena.num_bytes
        del op
        gc.collect()
        empty = len(manager.handle_cache)
        again = manager.get_handle(kwargs_of(CASE, context.rank))
        run_step(CASE, again, 1, context.device)
        return torch.equal(again.memory.table, table), manager.arena.num_bytes == num_bytes, empty


def test_a_handle_asked_for_again_has_the_same_addresses(ranks):
    assert ranks(same_kwargs_same_addresses, 4) == [(True, True, 0)] * 4


def ranks_that_differ(context: RankContext) -> Any:
    with create(context) as manager:
        hidden = 64 if context.rank != 2 else 128
        error = error_of(lambda: manager.get_handle(kwargs_of(CASE, context.rank, token_hidden_size=hidden)))
        assert len(manager.handle_cache) == 0
        run_step(CASE, manager.get_handle(kwargs_of(CASE, context.rank)), 0, context.device)
        return error


def test_ranks_that_ask_for_different_handles(ranks):
    for kind, message in ranks(ranks_that_differ, 4):
        assert kind is ConfigMismatchError
        assert "the same hidden_dim on all ranks; got 64 on ranks [0, 1, 3]; 128 on ranks [2]" in message


def bounded(context: RankContext) -> dict[str, Any]:
    with create(context) as manager:
        before = manager.get_handle(kwargs_of(CASE, context.rank))
        # as on a GPU: the interpreter has no multiprocessors
        before.engine.kernels.num_sms = 132
        manager.set_num_sms(4)
        bound = before.get_launch_config(is_dispatch=True)
        after = manager.get_handle(kwargs_of(CASE, context.rank), 1)
        after.engine.kernels.num_sms = 132
        own = manager.get_handle(kwargs_of(CASE, context.rank, max_sms=3))
        run_step(CASE, before, 0, context.device)
        run_step(CASE, after, 0, context.device)
        after_bound = after.get_launch_config(is_dispatch=True)
        manager.set_num_sms(0)
        unbound, after_unbound = (op.get_launch_config(is_dispatch=True) for op in (before, after))
        return {
            "bound": bound[0],
            "unbound": unbound[0],
            "after_bound": after_bound[0],
            "after_unbound": after_unbound[0],
            "own": own.config.max_sms,
        }


def test_the_bound_on_multiprocessors_reaches_all_ops(ranks):
    for seen in ranks(bounded, 4):
        unbound = FLAG_PROGRAMS[Phase.LOW_LATENCY_DISPATCH] + 16 + 4 * 16
        assert seen == {"bound": 4, "unbound": unbound, "after_bound": 4, "after_unbound": unbound, "own": 3}


# --- nodes ---


def explain(context: RankContext) -> tuple[dict[str, str], dict[str, str], bool]:
    with create(context) as manager:
        explained = manager.explain(), manager.explain(gpu_per_node=2), manager.internode
        assert manager._arena is None
        return explained


def test_explain(ranks):
    for one_node, two_nodes, internode in ranks(explain, 4):
        assert not internode
        assert one_node == {
            "backend": "ep_a2a",
            "kernel": "IntraNode",
            "kernel_reason": "all ranks on one node",
            "device": "cpu",
            "topology": "1 node(s) of 4 rank(s) each: found by host identity and a probe of /dev/shm",
        }
        assert two_nodes["kernel"] == "InterNodeV1LL or InterNodeV1"
        assert "2 nodes" in two_nodes["kernel_reason"]
        assert "virtual, cut by gpu_per_node=2; really 1 node(s)" in two_nodes["topology"]


def ask_for_virtual_nodes(context: RankContext) -> tuple[Any, ...]:
    with create(context) as manager:
        refused = error_of(lambda: manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=3)))
        impossible = error_of(lambda: manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=0)))
        nothing_made = manager._arena is None and len(manager.handle_cache) == 0
        # a node may be larger than the group
        for gpu_per_node in (4, 8):
            op = manager.get_handle(kwargs_of(CASE, context.rank, gpu_per_node=gpu_per_node))
            run_step(CASE, op, 0, context.device)
        return refused, impossible, nothing_made


def test_uneven_nodes_are_refused_with_a_way_out(ranks):
    for refused, impossible, nothing_made in ranks(ask_for_virtual_nodes, 4):
        kind, message = refused
        assert kind is UnsupportedError
        assert "equally many ranks" in message
        assert "allgather_reducescatter" in message
        assert "gpu_per_node=3" in message
        assert impossible[0] is ConfigError
        assert nothing_made


# --- the end ---


def destroy(context: RankContext) -> dict[str, Any]:
    manager = create(context)
    op = manager.get_handle(kwargs_of(CASE, context.rank))
    run_step(CASE, op, 0, context.device)
    arena = manager.arena
    manager.destroy()
    manager.destroy()
    manager.close()
    inputs = make_inputs(CASE, 0, context.rank)
    return {
        "arena": arena.closed,
        "forgotten": len(manager.handle_cache),
        "dispatch": error_of(lambda: op.dispatch(inputs.tokens, inputs.weights, None, inputs.ids)),
        "check": error_of(op.check),
        "reset": error_of(op.reset),
        "get_handle": error_of(lambda: manager.get_handle(kwargs_of(CASE, context.rank))),
        "arena again": error_of(lambda: manager.arena),
    }


def test_destroy_closes_ops_and_arena(ranks):
    for seen in ranks(destroy, 4):
        assert seen.pop("arena")
        assert seen.pop("forgotten") == 0
        assert {call: error[0] for call, error in seen.items()} == dict.fromkeys(seen, ClosedError)
        assert "create_manager" in seen["get_handle"][1]
        assert "get_handle" in seen["check"][1]


def one_after_another(context: RankContext) -> None:
    for _ in range(3):
        with create(context) as manager:
            run_step(CASE, manager.get_handle(kwargs_of(CASE, context.rank)), 0, context.device)


def test_managers_one_after_another(ranks):
    ranks(one_after_another, 4)


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


def chosen_by_environment(context: RankContext, name: str | None) -> Any:
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
            return manager.backend, type(manager).__name__
        except EpA2AError as error:
            return type(error), str(error)
        finally:
            ep_a2a.destroy_dist_env()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, ("ep_a2a", "NativeAll2AllManager")),
        ("ep_a2a", ("ep_a2a", "NativeAll2AllManager")),
        ("naive", ("naive", "NaiveAll2AllManager")),
        ("allgather_reducescatter", ("allgather_reducescatter", "AllGatherReduceScatterAll2AllManager")),
    ],
)
def test_the_environment_chooses_the_backend(ranks, name, expected):
    assert ranks(chosen_by_environment, 4, name) == [expected] * 4


def test_a_wrong_name_in_the_environment_is_named(ranks):
    for kind, message in ranks(chosen_by_environment, 4, "ep_a2s"):
        assert kind is UnknownNameError
        assert "got 'ep_a2s'. Did you mean 'ep_a2a'?" in message
