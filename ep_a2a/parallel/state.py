"""Makes and destroys this process's tensor-, data- and expert-parallel groups: init_dist_env, destroy_dist_env."""

import itertools
import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from ep_a2a import env
from ep_a2a.config.file import choose_backend
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import ConfigError, ConfigMismatchError, NotInitializedError, StateError
from ep_a2a.log_once import log_once
from ep_a2a.managers.registry import check_backend_name
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.parallel.communicator import DeviceCommunicator
from ep_a2a.parallel.group_coordinator import GroupCoordinator, destroy_group, group_ranks
from ep_a2a.topology.gpu_share import gpu_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Setup:
    """Arguments that the ranks must agree on."""

    tensor_model_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int
    backend: str
    all2all_backend: str

    @property
    def ranks_per_replica(self) -> int:
        return self.prefill_context_parallel_size * self.tensor_model_parallel_size

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.ranks_per_replica

    def check(self, data_parallel_rank: int, rank: int) -> None:
        """Raises ConfigError for sizes below 1 and for ranks that the sizes do not allow."""
        for name, value in asdict(self).items():
            if name.endswith("_size"):
                checked_integer(name, value, 1)
        decode_size, tensor_size = self.decode_context_parallel_size, self.tensor_model_parallel_size
        if tensor_size % decode_size:
            raise ConfigError(
                f"to divide TP size {tensor_size}", str(decode_size), field="decode_context_parallel_size"
            )
        if checked_integer("data_parallel_rank", data_parallel_rank, 0) >= self.data_parallel_size:
            raise ConfigError(f"< {self.data_parallel_size}", str(data_parallel_rank), field="data_parallel_rank")
        if checked_integer("rankID", rank, 0) >= self.ranks_per_replica:
            expected = f"< {self.ranks_per_replica}, the ranks of one DP replica"
            raise ConfigError(expected, str(rank), field="rankID")


@dataclass(frozen=True)
class _ParallelState:
    setup: _Setup
    rank: int
    tp: GroupCoordinator
    dp: GroupCoordinator
    ep: GroupCoordinator
    cleanup: ExitStack


_state: _ParallelState | None = None


def init_dist_env(
    tensor_model_parallel_size: int,
    rankID: int,
    backend: str = "cpu:gloo,cuda:nccl",
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    data_parallel_size: int = 1,
    data_parallel_rank: int = 0,
    decode_context_parallel_size: int = 1,
    prefill_context_parallel_size: int = 1,
    *,
    all2all_backend: str | None = None,
    config_file: str | Path | None = None,
    communicator: type[DeviceCommunicator] = DeviceCommunicator,
) -> None:
    """Joins the other ranks and makes the TP, DP and EP groups; AITER's function. Collective over the world.

    A DP replica has R = prefill_context_parallel_size * tensor_model_parallel_size ranks, the world has
    data_parallel_size * R, this process is its rank data_parallel_rank * R + rankID, and all of it is one EP group.
    torch.distributed is initialised unless it is already, in which case its size and rank must be these.
    A second call with the same sizes, ranks and backends does nothing, whatever its local_rank and
    distributed_init_method; with others it is a StateError.

    All ranks must agree on everything but rankID, data_parallel_rank and local_rank.

    Args:
        tensor_model_parallel_size: ranks of a TP group.
        rankID: this process's rank within its data-parallel replica.
        backend: torch.distributed backend string. One that names nccl puts this rank on a GPU, any other on the CPU;
            without CUDA, one that names nccl becomes gloo, with a warning.
        distributed_init_method: where the ranks meet: env://, tcp://host:port or file:///path.
        local_rank: index of this rank's GPU; -1 takes LOCAL_RANK, else a CUDA device the process has already chosen,
            else the global rank. An index counts modulo the visible devices: ranks may share a GPU, without NCCL.
        data_parallel_size: DP replicas.
        data_parallel_rank: this process's replica.
        decode_context_parallel_size: must divide the TP size, whose ranks it reuses; makes no group here.
        prefill_context_parallel_size: multiplies the ranks of a replica; makes no group of its own here.
        all2all_backend: backend of the EP group; None goes by the config file, then EP_A2A_BACKEND, then "ep_a2a".
        config_file: TOML file (configs/*.toml); None takes EP_A2A_CONFIG, and no file if that is unset.
        communicator: class of the groups' communicators.

    Raises:
        ConfigError: sizes, ranks, the device or the config file are impossible.
        ConfigMismatchError: the ranks disagree; the error names the argument and the ranks.
        StateError: already initialised with other arguments.
    """
    global _state
    setup = _Setup(
        tensor_model_parallel_size,
        data_parallel_size,
        decode_context_parallel_size,
        prefill_context_parallel_size,
        _usable_backend(backend),
        choose_backend(all2all_backend, config_file),
    )
    check_backend_name(setup.all2all_backend)
    setup.check(data_parallel_rank, rankID)
    rank = data_parallel_rank * setup.ranks_per_replica + rankID
    if _state is not None:
        _check_same(_state, setup, rank)
        return
    device = _choose_device(setup.backend, local_rank, rank)
    with ExitStack() as cleanup:
        _join_world(setup, rank, distributed_init_method, cleanup)
        _check_agreement(setup)
        _state = _make_state(setup, rank, device, communicator, cleanup)


def destroy_dist_env() -> None:
    """Destroys the EP manager, the groups, and torch.distributed if init_dist_env had initialised it; idempotent."""
    global _state
    state, _state = _state, None
    if state is not None:
        state.cleanup.close()


def is_initialized() -> bool:
    """Whether the groups exist."""
    return _state is not None


def get_tp_group() -> GroupCoordinator:
    """Returns the tensor-parallel group of this rank; NotInitializedError before init_dist_env."""
    return _initialized("a tensor-parallel group").tp


def get_dp_group() -> GroupCoordinator:
    """Returns the data-parallel group of this rank; NotInitializedError before init_dist_env."""
    return _initialized("a data-parallel group").dp


def get_ep_group() -> GroupCoordinator:
    """Returns the expert-parallel group of this rank, DP and TP merged; NotInitializedError before init_dist_env."""
    return _initialized("an expert-parallel group").ep


def _initialized(group: str) -> _ParallelState:
    if _state is None:
        raise NotInitializedError(group, "none")
    return _state


def _check_same(state: _ParallelState, setup: _Setup, rank: int) -> None:
    if (state.setup, state.rank) != (setup, rank):
        raise StateError(
            f"the arguments of the first init_dist_env: rank {state.rank}, {state.setup}",
            f"rank {rank}, {setup}",
            "Call destroy_dist_env() first.",
        )


_worlds = itertools.count()
"""Numbers the worlds that this process joins; all ranks join the same ones."""


def _join_world(setup: _Setup, rank: int, init_method: str, cleanup: ExitStack) -> None:
    if dist.is_initialized():
        if (dist.get_world_size(), dist.get_rank()) != (setup.world_size, rank):
            raise ConfigError(
                f"torch.distributed as rank {rank} of {setup.world_size}",
                f"rank {dist.get_rank()} of {dist.get_world_size()}",
                "Correct the parallel sizes and ranks, or let init_dist_env initialise torch.distributed.",
            )
        return
    # torchrun's store outlives the group: keys of an earlier group would be taken for those of this one
    store, *_ = next(rendezvous(init_method, rank, setup.world_size))
    store = distributed_c10d.PrefixStore(f"ep_a2a/world/{next(_worlds)}", store)
    dist.init_process_group(setup.backend, store=store, world_size=setup.world_size, rank=rank)
    cleanup.callback(destroy_group)


def _check_agreement(setup: _Setup) -> None:
    """Compares the setups before groups are made from them, since ranks with different groups would hang."""
    setups = Rendezvous(distributed_c10d._get_default_group()).exchange("parallel setup", asdict(setup))
    for name, expected in setups[0].items():
        other = [rank for rank, one in enumerate(setups) if one[name] != expected]
        if other:
            raise ConfigMismatchError(
                f"{name}={expected!r} on all ranks, as on rank 0",
                f"{setups[other[0]][name]!r} on rank {', '.join(map(str, other))}",
            )


def _make_state(
    setup: _Setup, rank: int, device: torch.device, communicator: type[DeviceCommunicator], cleanup: ExitStack
) -> _ParallelState:
    ranks = group_ranks(
        setup.tensor_model_parallel_size,
        setup.data_parallel_size,
        prefill_context_parallel_size=setup.prefill_context_parallel_size,
    )
    coordinators = {}
    for name, groups in (("tp", ranks.tp), ("dp", ranks.dp), ("ep", ranks.ep)):
        coordinators[name] = GroupCoordinator(groups, name, device, setup.backend, setup.all2all_backend, communicator)
        cleanup.callback(coordinators[name].destroy)
    ep_communicator = coordinators["ep"].device_communicator
    ep_communicator.dp_group, ep_communicator.tp_group = coordinators["dp"], coordinators["tp"]
    return _ParallelState(setup, rank, **coordinators, cleanup=cleanup.pop_all())


def _usable_backend(backend: str) -> str:
    if "nccl" not in backend or (torch.cuda.is_available() and dist.is_nccl_available()):
        return backend
    log_once(logger, logging.WARNING, f"no CUDA or no NCCL here: backend 'gloo' instead of {backend!r}")
    return "gloo"


def _choose_device(backend: str, local_rank: int, rank: int) -> torch.device:
    """Returns this rank's device, a GPU if the backend names nccl, and makes a GPU the current device."""
    if "nccl" not in backend:
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    launched_as = env.other_variable("LOCAL_RANK")
    if local_rank >= 0:
        index = local_rank
    elif launched_as:
        if not launched_as.isdecimal():
            raise ConfigError("LOCAL_RANK to be a number", repr(launched_as), "Correct or unset it.")
        index = int(launched_as)
    else:
        index = torch.cuda.current_device() or rank % num_devices
    if num_devices == 1:
        # Launchers that give each process one visible device still count local ranks on the host.
        index = 0
    if index >= num_devices:
        shared = f"local rank {index} and {num_devices} GPUs: ranks share GPUs, and NCCL is not to be had"
        log_once(logger, logging.WARNING, shared)
        index = gpu_of(index, num_devices)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
