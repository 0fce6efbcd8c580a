"""Rank formulas, the choice of a backend, and everything that is wrong before ranks meet."""

from pathlib import Path

import pytest
import torch

import ep_a2a
from ep_a2a.compat import deep_ep_sizes
from ep_a2a.config.file import choose_backend, read_config_file
from ep_a2a.errors import ConfigError, NotInitializedError, StateError
from ep_a2a.parallel import communicator, state
from ep_a2a.parallel.group_coordinator import group_ranks
from ep_a2a.parallel.state import destroy_dist_env, get_dp_group, get_tp_group, init_dist_env, is_initialized

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "config.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (4, 1), (1, 4), (2, 2), (4, 2), (3, 5)])
def test_one_ep_group_of_all_dp_and_tp_ranks(dp, tp):
    ranks = group_ranks(tp, dp)
    assert ranks.ep == [list(range(dp * tp))]
    assert ranks.tp == [list(range(replica * tp, (replica + 1) * tp)) for replica in range(dp)]
    assert ranks.dp == [list(range(rank, dp * tp, tp)) for rank in range(tp)]


def test_each_pipeline_stage_has_its_own_ep_group():
    ranks = group_ranks(2, 2, pipeline_parallel_size=2)
    assert ranks.ep == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert ranks.tp == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks.dp == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_prefill_context_ranks_are_merged_too():
    ranks = group_ranks(2, 2, prefill_context_parallel_size=2)
    assert ranks.ep == [list(range(8))]
    assert ranks.dp == [[0, 4], [2, 6], [1, 5], [3, 7]]


SHIPPED = sorted(path for path in CONFIGS.glob("*.toml") if path.name != deep_ep_sizes.FILE_NAME)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_config_files_name_a_known_backend(path):
    assert read_config_file(path)["all2all_backend"] in ep_a2a.available_backends()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('all2all_backnd = "naive"', "Did you mean 'all2all_backend'"),
        ("speed = 1", "Remove the key"),
        ("all2all_backend = 3", "to be a name; got 3"),
        ('all2all_backend = ""', "to be a name"),
        ("all2all_backend =", "readable TOML"),
    ],
)
def test_wrong_config_files(config_file, text, message):
    with pytest.raises(ConfigError, match=message):
        read_config_file(config_file(text))


def test_missing_config_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(tmp_path / "missing.toml")


def test_backend_order(monkeypatch, config_file):
    assert choose_backend() == "ep_a2a"
    monkeypatch.setenv("EP_A2A_BACKEND", "from_environment")
    assert choose_backend() == "from_environment"
    path = config_file('all2all_backend = "from_file"')
    assert choose_backend(None, path) == "from_file"
    monkeypatch.setenv("EP_A2A_CONFIG", str(path))
    assert choose_backend() == "from_file"
    assert choose_backend("from_argument", path) == "from_argument"
    path.write_text("")
    assert choose_backend() == "from_environment"


@pytest.mark.parametrize(
    ("num_devices", "current", "launched_as", "local_rank", "index"),
    [
        (8, 0, None, -1, 3),
        (4, 0, None, -1, 1),
        (8, 6, None, -1, 6),
        (8, 6, "2", -1, 2),
        (8, 6, "2", 5, 5),
        (1, 0, "3", -1, 0),
        (1, 0, None, 3, 0),
        # more ranks than GPUs share them
        (4, 0, None, 4, 0),
        (4, 0, None, 7, 3),
    ],
)
def test_gpu_of_global_rank_three_or_five(monkeypatch, num_devices, current, launched_as, local_rank, index):
    chosen = pretend_gpus(monkeypatch, num_devices, current, launched_as)
    rank = 5 if num_devices == 4 else 3
    assert state._choose_device("cpu:gloo,cuda:nccl", local_rank, rank) == torch.device("cuda", index)
    assert chosen == [index]


def test_backend_without_nccl_means_cpu(monkeypatch):
    assert pretend_gpus(monkeypatch, 8, 0, "3") == []
    assert state._choose_device("gloo", 3, 3) == torch.device("cpu")


def pretend_gpus(monkeypatch, num_devices, current, launched_as):
    """The list that collects what is made the current device."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if launched_as is not None:
        monkeypatch.setenv("LOCAL_RANK", launched_as)
    return chosen


def test_a_local_rank_that_is_no_number_is_named(monkeypatch):
    pretend_gpus(monkeypatch, 8, 0, "gpu3")
    with pytest.raises(ConfigError, match="LOCAL_RANK to be a number; got 'gpu3'"):
        state._choose_device("nccl", -1, 3)


def test_nothing_before_init():
    for get in (ep_a2a.get_ep_group, get_tp_group, get_dp_group):
        with pytest.raises(NotInitializedError, match="init_dist_env"):
            get()
    assert not is_initialized()
    destroy_dist_env()


@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_model_parallel_size": 0},
        {"data_parallel_size": 0},
        {"prefill_context_parallel_size": -1},
        {"decode_context_parallel_size": 2},
        {"rankID": 1},
        {"rankID": -1},
        {"data_parallel_rank": 1},
        {"config_file": "/missing.toml"},
    ],
)
def test_impossible_arguments_raise_before_the_ranks_meet(arguments):
    with pytest.raises(ConfigError):
        init_dist_env(**({"tensor_model_parallel_size": 1, "rankID": 0, "backend": "gloo"} | arguments))
    assert not is_initialized()


def test_another_backend_is_refused_once_there_is_a_manager(monkeypatch):
    monkeypatch.setattr(communicator.dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(communicator.dist, "get_world_size", lambda _: 1)
    made = communicator.DeviceCommunicator(object(), unique_name="ep:0")
    made.all2all_backend = "naive"
    made.all2all_manager = object()
    made.all2all_backend = "naive"
    with pytest.raises(StateError, match="'naive' once the manager has been made") as caught:
        made.all2all_backend = "ep_a2a"
    assert "all2all_manager" in caught.value.remedy
    assert made.all2all_backend == "naive"
