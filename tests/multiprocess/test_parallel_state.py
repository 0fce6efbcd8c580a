"""init_dist_env and its groups among real processes; the manager is a stand-in."""

import contextlib
import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import ep_a2a
from ep_a2a import errors
from ep_a2a.managers.registry import register_manager
from ep_a2a.parallel.group_coordinator import GroupCoordinator
from ep_a2a.parallel.state import get_dp_group, get_tp_group, is_initialized
from ep_a2a.testing import RankFailure, run_ranks
from ep_a2a.topology import in_the_same_node_as
from tests.integration.programs import run_python, succeeded
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


@contextlib.contextmanager
def initialised(context, data_parallel_size, **options):
    initialise(context, data_parallel_size, **options)
    try:
        yield ep_a2a.get_ep_group()
    finally:
        ep_a2a.destroy_dist_env()


def describe_groups(context, data_parallel_size):
    with initialised(context, data_parallel_size):
        described = {}
        for name, get in (("tp", get_tp_group), ("dp", get_dp_group), ("ep", ep_a2a.get_ep_group)):
            group = get()
            total = torch.tensor([group.rank], device=group.device)
            dist.all_reduce(total, group=group.device_group)
            assert all(in_the_same_node_as(group.cpu_group, group.world_size - 1))
            assert group.device_communicator.is_ep_communicator == (name == "ep")
            assert (group.device, group.rank) == (context.device, context.rank)
            described[name] = (group.unique_name, group.ranks, group.rank_in_group, group.world_size, int(total))
        return described


def life_of_a_manager(context):
    register_manager("fake", FakeManager, replace=True)
    FakeManager.made = 0
    with initialised(context, context.world_size, all2all_backend="fake") as group:
        communicator = group.device_communicator
        assert FakeManager.made == 0
        first = communicator.all2all_manager
        assert communicator.all2all_manager is first
        assert (FakeManager.made, first.world_size) == (1, context.world_size)
        assert first.device == communicator.device
        assert first.device_group is (None if context.device.type == "cpu" else communicator.device_group)
        assert (first.dp_group, first.tp_group) == (get_dp_group(), get_tp_group())
        assert communicator.dispatch(1, two=2) == ("dispatched", (1,), {"two": 2})
        assert communicator.combine(3) == ("combined", (3,), {})
        injected = FakeManager(communicator.cpu_group)
        communicator.all2all_manager = injected
        communicator.all2all_manager = injected
        assert communicator.all2all_manager is injected
        assert (first.num_destroyed, injected.num_destroyed) == (1, 0)
        tensor_parallel = get_tp_group().device_communicator
        for call in (
            lambda: tensor_parallel.all2all_manager,
            lambda: setattr(tensor_parallel, "all2all_manager", injected),
        ):
            with pytest.raises(errors.UnsupportedError, match=r"get_ep_group\(\)\.device_communicator"):
                call()
    ep_a2a.destroy_dist_env()
    assert injected.num_destroyed == 1
    with pytest.raises(errors.ClosedError):
        _ = communicator.all2all_manager


def unknown_backend(context):
    """Refused before any group is made; and again by a communicator whose backend was changed afterwards."""
    with pytest.raises(errors.UnknownNameError, match="Did you mean 'ep_a2a'"):
        initialise(context, context.world_size, all2all_backend="ep_a2b")
    assert not is_initialized()
    with initialised(context, context.world_size) as group:
        group.device_communicator.all2all_backend = "ep_a2b"
        with pytest.raises(errors.UnknownNameError, match="Did you mean 'ep_a2a'"):
            _ = group.device_communicator.all2all_manager


def initialise_twice(context):
    with initialised(context, 2) as group:
        initialise(context, 2)
        assert ep_a2a.get_ep_group() is group
        with pytest.raises(errors.StateError, match="destroy_dist_env"):
            initialise(context, 4)


def destroy_leaves_no_group(context):
    before = len(distributed_c10d._world.pg_map)
    for _ in range(3):
        with initialised(context, 2):
            assert is_initialized()
    assert len(distributed_c10d._world.pg_map) == before
    assert dist.is_initialized()
    assert not is_initialized()
    with pytest.raises(errors.NotInitializedError):
        ep_a2a.get_ep_group()


def disagree_on_backend(context):
    found = "all2all_backend='naive' on all ranks, as on rank 0; got 'ep_a2a' on rank 2"
    with pytest.raises(errors.ConfigMismatchError, match=found):
        initialise(context, 4, all2all_backend="ep_a2a" if context.rank == 2 else "naive")
    assert not is_initialized()


def disagree_on_sizes(context):
    found = "tensor_model_parallel_size=2 on all ranks, as on rank 0; got 1 on rank 3"
    with pytest.raises(errors.ConfigMismatchError, match=found):
        initialise(context, 2 if context.rank < 3 else 4)
    assert not is_initialized()


def wrong_world(context):
    with pytest.raises(errors.ConfigError, match="of 4"):
        ep_a2a.init_dist_env(tensor_model_parallel_size=2, rankID=context.rank % 2)


@pytest.mark.parametrize(
    "body",
    [
        life_of_a_manager,
        unknown_backend,
        initialise_twice,
        destroy_leaves_no_group,
        disagree_on_backend,
        disagree_on_sizes,
        wrong_world,
    ],
)
def test_what_four_ranks_see(ranks, body):
    ranks(body, 4)


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


def test_two_replicas_of_two(ranks):
    for rank, groups in enumerate(ranks(describe_groups, 4, 2)):
        first = rank // 2 * 2
        assert groups["ep"] == ("ep:0", [0, 1, 2, 3], rank, 4, 6)
        assert groups["tp"] == (f"tp:{rank // 2}", [first, first + 1], rank % 2, 2, 2 * first + 1)
        assert groups["dp"] == (f"dp:{rank % 2}", [rank % 2, rank % 2 + 2], rank // 2, 2, 2 * (rank % 2) + 2)


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
    assert isinstance(caught.value.errors[3], errors.ConfigError)


JOIN_TWICE = """
import os
import torch.distributed as dist
from ep_a2a.parallel import state
for _ in range(3):
    state.init_dist_env(2, int(os.environ["RANK"]), backend="gloo")
    parts = [None, None]
    dist.all_gather_object(parts, dist.get_rank())
    assert parts == [0, 1]
    state.destroy_dist_env()
"""


def test_a_world_can_be_joined_again_under_torchrun(tmp_path):
    """The store of torchrun outlives the groups, and still holds the addresses of the first one."""
    program = tmp_path / "program.py"
    program.write_text(JOIN_TWICE)
    launcher = "-m torch.distributed.run --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0"
    succeeded(run_python(*launcher.split(), str(program)))
