"""init_dist_env and its groups among real processes; the manager is a stand-in."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import ep_a2a
from ep_a2a.errors import (
    ClosedError,
    ConfigError,
    ConfigMismatchError,
    EpA2AError,
    NotInitializedError,
    StateError,
    UnknownNameError,
    UnsupportedError,
)
from ep_a2a.managers.registry import register_manager
from ep_a2a.parallel.state import GroupCoordinator, get_dp_group, get_tp_group, in_the_same_node_as, is_initialized
from ep_a2a.testing import RankFailure, run_ranks
from tests.messages import messages_of


class FakeManager:
    """Counts what is asked of it."""

    made = 0

    def __init__(self, cpu_group, tcp_store_group=None):
        type(self).made += 1
        self.world_size = dist.get_world_size(cpu_group)
        self.num_destroyed = 0
        self.device_group = None

    def dispatch(self, *args, **kwargs):
        return "dispatched", args, kwargs

    def combine(self, *args, **kwargs):
        return "combined", args, kwargs

    def destroy(self):
        self.num_destroyed += 1


def initialise(context, data_parallel_size, **options):
    """What an engine's worker calls: its rank within its DP replica, and the number of that replica."""
    tensor_parallel_size = context.world_size // data_parallel_size
    arguments = {
        "tensor_model_parallel_size": tensor_parallel_size,
        "rankID": context.rank % tensor_parallel_size,
        "data_parallel_size": data_parallel_size,
        "data_parallel_rank": context.rank // tensor_parallel_size,
    }
    ep_a2a.init_dist_env(**(arguments | options))


def error_of(function, *args):
    try:
        function(*args)
    except EpA2AError as error:
        return type(error), str(error)
    return None


def describe_groups(context, data_parallel_size):
    initialise(context, data_parallel_size)
    try:
        described = {}
        for name, get in (("tp", get_tp_group), ("dp", get_dp_group), ("ep", ep_a2a.get_ep_group)):
            group = get()
            total = torch.tensor([group.rank], device=group.device)
            dist.all_reduce(total, group=group.device_group)
            same_node = in_the_same_node_as(group.cpu_group, group.world_size - 1)
            described[name] = (
                group.unique_name,
                group.ranks,
                group.rank_in_group,
                group.world_size,
                int(total),
                all(same_node),
            )
            is_ep = group.device_communicator.is_ep_communicator
            if is_ep != (name == "ep") or group.device != context.device or group.rank != context.rank:
                raise AssertionError(f"{name} group is wrong: {vars(group)}")
        return described
    finally:
        ep_a2a.destroy_dist_env()


def life_of_a_manager(context):
    register_manager("fake", FakeManager, replace=True)
    FakeManager.made = 0
    initialise(context, context.world_size, all2all_backend="fake")
    try:
        communicator = ep_a2a.get_ep_group().device_communicator
        seen = {"before": FakeManager.made}
        first = communicator.all2all_manager
        seen["lazy"] = (FakeManager.made, first is communicator.all2all_manager, first.world_size)
        seen["given"] = (
            first.device == communicator.device,
            first.device_group is (None if context.device.type == "cpu" else communicator.device_group),
            first.dp_group is get_dp_group(),
            first.tp_group is get_tp_group(),
        )
        seen["dispatch"] = communicator.dispatch(1, two=2)
        seen["combine"] = communicator.combine(3)
        injected = FakeManager(communicator.cpu_group)
        communicator.all2all_manager = injected
        communicator.all2all_manager = injected
        seen["setter"] = (communicator.all2all_manager is injected, first.num_destroyed, injected.num_destroyed)
        tensor_parallel = get_tp_group().device_communicator
        seen["tp"] = error_of(lambda: tensor_parallel.all2all_manager)
        seen["tp setter"] = error_of(setattr, tensor_parallel, "all2all_manager", injected)
    finally:
        ep_a2a.destroy_dist_env()
    ep_a2a.destroy_dist_env()
    seen["destroyed"] = injected.num_destroyed
    seen["closed"] = error_of(lambda: communicator.all2all_manager)
    return seen


def unknown_backend(context):
    """Refused before any group is made; and again by a communicator whose backend was changed afterwards."""

    def start():
        initialise(context, context.world_size, all2all_backend="ep_a2b")

    at_start = error_of(start)
    initialised = is_initialized()
    initialise(context, context.world_size)
    try:
        communicator = ep_a2a.get_ep_group().device_communicator
        communicator.all2all_backend = "ep_a2b"
        return at_start, initialised, error_of(lambda: communicator.all2all_manager)
    finally:
        ep_a2a.destroy_dist_env()


def initialise_twice(context):
    initialise(context, 2)
    try:
        group = ep_a2a.get_ep_group()
        initialise(context, 2)
        same = ep_a2a.get_ep_group() is group
        return same, error_of(initialise, context, 4)
    finally:
        ep_a2a.destroy_dist_env()


def groups_left(context, num_rounds):
    before = len(distributed_c10d._world.pg_map)
    for _ in range(num_rounds):
        initialise(context, 2)
        ep_a2a.destroy_dist_env()
    return (
        len(distributed_c10d._world.pg_map) - before,
        dist.is_initialized(),
        is_initialized(),
        error_of(ep_a2a.get_ep_group),
    )


def disagree_on_backend(context):
    backend = "ep_a2a" if context.rank == 2 else "naive"
    return error_of(lambda: initialise(context, 4, all2all_backend=backend)), is_initialized()


def disagree_on_sizes(context):
    return error_of(initialise, context, 2 if context.rank < 3 else 4), is_initialized()


def wrong_world(context):
    return error_of(lambda: ep_a2a.init_dist_env(tensor_model_parallel_size=2, rankID=context.rank % 2))


def own_world(context, store_path):
    """Example 7.1 of AITER's guide, up to the manager, in a process without torch.distributed."""
    dist.destroy_process_group()
    with messages_of(logging.getLogger("ep_a2a")) as messages:
        for number in range(2):
            ep_a2a.init_dist_env(
                tensor_model_parallel_size=1,
                rankID=0,
                backend="nccl",
                distributed_init_method=f"file://{store_path}{number}",
                data_parallel_size=context.world_size,
                data_parallel_rank=context.rank,
            )
            ranks = ep_a2a.get_ep_group().ranks
            ep_a2a.destroy_dist_env()
    return ranks, dist.is_initialized(), len(distributed_c10d._world.pg_map), messages


def coordinator_without_rank_zero(context):
    coordinator = GroupCoordinator([[0], [3, 1, 2]], "ep", context.device, "gloo", "fake")
    try:
        coordinator.device_communicator.all2all_manager = FakeManager(coordinator.cpu_group)
        same_node = in_the_same_node_as(coordinator.cpu_group)
        manager = coordinator.device_communicator.all2all_manager
        return coordinator.unique_name, coordinator.ranks, coordinator.rank_in_group, same_node, manager.world_size
    finally:
        coordinator.destroy()
        coordinator.destroy()


def coordinator_with_missing_rank(context):
    GroupCoordinator([[0, 1], [2]], "ep", context.device, "gloo")


def test_every_rank_its_own_replica(ranks):
    for rank, groups in enumerate(ranks(describe_groups, 4, 4)):
        assert groups["ep"] == ("ep:0", [0, 1, 2, 3], rank, 4, 6, True)
        assert groups["dp"] == ("dp:0", [0, 1, 2, 3], rank, 4, 6, True)
        assert groups["tp"] == (f"tp:{rank}", [rank], 0, 1, rank, True)


def test_two_replicas_of_two(ranks):
    for rank, groups in enumerate(ranks(describe_groups, 4, 2)):
        first = rank // 2 * 2
        assert groups["ep"] == ("ep:0", [0, 1, 2, 3], rank, 4, 6, True)
        assert groups["tp"] == (f"tp:{rank // 2}", [first, first + 1], rank % 2, 2, 2 * first + 1, True)
        assert groups["dp"] == (f"dp:{rank % 2}", [rank % 2, rank % 2 + 2], rank // 2, 2, 2 * (rank % 2) + 2, True)


def test_manager_is_lazy_replaceable_and_destroyed(ranks):
    for seen in ranks(life_of_a_manager, 4):
        assert seen["before"] == 0
        assert seen["lazy"] == (1, True, 4)
        assert seen["given"] == (True, True, True, True)
        assert seen["dispatch"] == ("dispatched", (1,), {"two": 2})
        assert seen["combine"] == ("combined", (3,), {})
        assert seen["setter"] == (True, 1, 0)
        assert seen["tp"][0] is seen["tp setter"][0] is UnsupportedError
        assert "get_ep_group().device_communicator" in seen["tp"][1]
        assert seen["destroyed"] == 1
        assert seen["closed"][0] is ClosedError


def test_unknown_backend(ranks):
    for at_start, initialised, at_first_use in ranks(unknown_backend, 4):
        assert not initialised
        for kind, message in (at_start, at_first_use):
            assert kind is UnknownNameError
            assert "Did you mean 'ep_a2a'" in message


def test_second_init_is_idempotent_or_an_error(ranks):
    for same, (kind, message) in ranks(initialise_twice, 4):
        assert same
        assert kind is StateError
        assert "destroy_dist_env" in message


def test_destroy_leaves_no_group(ranks):
    for num_left, torch_initialised, initialised, (kind, _) in ranks(groups_left, 4, 3):
        assert num_left == 0
        assert torch_initialised
        assert not initialised
        assert kind is NotInitializedError


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (disagree_on_backend, "all2all_backend='naive' on all ranks, as on rank 0; got 'ep_a2a' on rank 2"),
        (disagree_on_sizes, "tensor_model_parallel_size=2 on all ranks, as on rank 0; got 1 on rank 3"),
    ],
)
def test_disagreement_is_found_before_groups_are_made(ranks, body, message):
    for (kind, text), initialised in ranks(body, 4):
        assert kind is ConfigMismatchError
        assert message in text
        assert not initialised


def test_existing_process_group_of_another_size_is_refused(ranks):
    for kind, message in ranks(wrong_world, 4):
        assert kind is ConfigError
        assert "of 4" in message


def test_own_process_group_comes_and_goes(tmp_path):
    for ranks, torch_initialised, num_groups, messages in run_ranks(own_world, 2, tmp_path / "store"):
        assert ranks == [0, 1]
        assert not torch_initialised
        assert num_groups == 0
        assert len(messages) == (0 if torch.cuda.is_available() else 1)


def test_ep_group_without_global_rank_zero(ranks):
    results = ranks(coordinator_without_rank_zero, 4)
    assert results[0] == ("ep:0", [0], 0, [True], 1)
    for rank in (1, 2, 3):
        assert results[rank] == ("ep:1", [1, 2, 3], rank - 1, [True] * 3, 3)


def test_rank_in_no_group_is_refused():
    with pytest.raises(RankFailure) as caught:
        run_ranks(coordinator_with_missing_rank, 4, grace_secs=5)
    assert isinstance(caught.value.errors[3], ConfigError)
