"""The plugin's entry point, which vLLM calls in every process of an environment that has this package."""

import logging
import sys
from types import SimpleNamespace
from typing import Literal, get_args

import pytest

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm import plugin as name
from ep_a2a.integrations.vllm import register, support
from ep_a2a.log_once import log_once

OTHERS = (
    ["vllm", "serve", "model"],
    ["vllm", "serve", "/models/x-ep_a2a"],
    ["vllm", "serve", "model", "--config", "ep_a2a"],
    ["vllm", "serve", "model", "--all2all-backend", "deepep_low_latency"],
    ["vllm", "serve", "--model=ep_a2a_model"],
)
OURS = (
    ["vllm", "serve", "model", "--all2all-backend", "ep_a2a"],
    ["vllm", "serve", "model", "--all2all-backend=ep_a2a"],
    ["vllm", "serve", "model", "--all2all_backend", "ep_a2a"],
)


@pytest.fixture
def other_vllm(monkeypatch, found):
    """A vLLM whose ParallelConfig is built in another way."""

    def fail() -> None:
        raise AttributeError("no All2AllBackend")

    monkeypatch.setattr(name, "_add_name", fail)
    monkeypatch.setattr(support, "vllm_version", lambda: "0.77.0")
    monkeypatch.setattr(support, "problems", lambda: list(found))
    support.check.cache_clear()
    yield
    support.check.cache_clear()


@pytest.fixture
def found():
    """What the check of names finds."""
    return ["vllm/config/parallel.py has no All2AllBackend"]


@pytest.mark.parametrize("arguments", OTHERS)
def test_users_of_other_backends_are_not_bothered(other_vllm, monkeypatch, caplog, arguments):
    monkeypatch.setattr(sys, "argv", arguments)
    with caplog.at_level(logging.INFO, "vllm.ep_a2a"):
        register()
    assert not caplog.records


@pytest.mark.parametrize("found", [["vllm/config/parallel.py has no All2AllBackend"], []])
@pytest.mark.parametrize("arguments", OURS)
def test_users_of_this_backend_learn_what_is_wrong(other_vllm, monkeypatch, found, arguments):
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(UnsupportedError) as caught:
        register()
    for part in (support.SUPPORTED, "0.77.0", *found) if found else ("no All2AllBackend",):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, AttributeError) == (not found)


def test_processes_that_vllm_starts_are_not_checked_again(other_vllm, monkeypatch):
    monkeypatch.setattr(sys, "argv", OURS[0])
    monkeypatch.setattr(name, "_add_name", lambda: None)
    monkeypatch.setattr(name.multiprocessing, "parent_process", lambda: "vLLM")
    register()


@pytest.mark.parametrize(("value", "num_warnings"), [("ep_a2a", 1), ("allgather_reducescatter", 0)])
def test_the_variable_of_older_vllms_is_said_to_do_nothing(other_vllm, monkeypatch, caplog, value, num_warnings):
    log_once.cache_clear()
    monkeypatch.setattr(sys, "argv", OTHERS[0])
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", value)
    for _ in range(2):
        register()
    assert len(caplog.records) == num_warnings
    for record in caplog.records:
        assert "--all2all-backend ep_a2a" in record.message
        # the place that warns, not the function that logs
        assert record.filename == "plugin.py"


def fake_vllm(monkeypatch, backends) -> SimpleNamespace:
    class ParallelConfig:
        def __init__(self, all2all_backend: str) -> None:
            self.all2all_backend = all2all_backend
            self.__post_init__()

        def __post_init__(self) -> None:
            self.is_checked = True

    parallel = SimpleNamespace(ParallelConfig=ParallelConfig, All2AllBackend=backends)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(parallel=parallel))
    return parallel


def test_a_vllm_that_takes_every_name_keeps_its_type(monkeypatch):
    """As with the registry of PR #50556: a list of names would shut out all others."""
    chosen: list[str] = []
    chooser = SimpleNamespace(choose=lambda config: chosen.append(config.all2all_backend))
    monkeypatch.setitem(sys.modules, "ep_a2a.integrations.vllm.parallel_config", chooser)
    parallel = fake_vllm(monkeypatch, str)
    register()
    register()
    assert parallel.All2AllBackend is str
    for backend in ("other", "ep_a2a"):
        assert parallel.ParallelConfig(backend).is_checked
    assert chosen == ["ep_a2a"]


def test_a_vllm_whose_type_cannot_be_extended_is_left_usable(monkeypatch):
    monkeypatch.setattr(sys, "argv", OTHERS[0])
    parallel = fake_vllm(monkeypatch, Literal["naive", "other"])
    register()
    assert parallel.ParallelConfig("other").is_checked
    assert "other" in get_args(parallel.All2AllBackend)


def test_without_vllm_nothing_happens(monkeypatch):
    monkeypatch.setattr(sys, "argv", OTHERS[0])
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    register()
