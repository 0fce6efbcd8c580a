"""The plugin's entry point, which vLLM calls in every process of an environment that has this package."""

import logging
import sys
import tomllib
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Literal, get_args

import pytest

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm import plugin as name
from ep_a2a.integrations.vllm import register, support
from tests.engines.vllm.contract.wheels import ROOT

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
    ["vllm", "serve", "--config", str(ROOT / "configs/vllm/single_node.yaml")],
    ["vllm", "serve", f"--config={ROOT / 'configs/vllm/two_nodes.yaml'}"],
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
    for part in (support.SUPPORTED, "0.77.0", *found):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, AttributeError) == (not found)


def test_processes_that_vllm_starts_are_not_checked_again(other_vllm, monkeypatch):
    monkeypatch.setattr(sys, "argv", OURS[0])
    monkeypatch.setattr(name, "_add_name", lambda: None)
    monkeypatch.setattr(name.multiprocessing, "parent_process", lambda: "vLLM")
    register()


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


@pytest.mark.parametrize("method", ["rebuild", "cache"])
def test_an_error_in_the_middle_leaves_the_configuration_as_it_was(monkeypatch, method):
    """pydantic's rebuild takes the class apart before it builds it anew."""
    import pydantic.dataclasses

    monkeypatch.setattr(sys, "argv", OTHERS[0])

    @pydantic.dataclasses.dataclass
    class ParallelConfig:
        all2all_backend: Literal["naive", "other"] = "other"

        def __post_init__(self) -> None:
            self.is_checked = True

    parallel = SimpleNamespace(ParallelConfig=ParallelConfig, All2AllBackend=Literal["naive", "other"])
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(parallel=parallel))
    rebuild = pydantic.dataclasses.rebuild_dataclass

    def fails(cls, **options):
        if method == "cache":
            rebuild(cls, **options)
        else:
            for attribute in ("__pydantic_core_schema__", "__pydantic_validator__", "__pydantic_serializer__"):
                delattr(cls, attribute)
        raise RuntimeError("in the middle")

    monkeypatch.setattr(pydantic.dataclasses, "rebuild_dataclass", fails)
    before = {name: value for name, value in vars(ParallelConfig).items() if name != "__init__"}
    annotations = dict(ParallelConfig.__annotations__)
    register()
    assert {name: value for name, value in vars(ParallelConfig).items() if name != "__init__"} == before
    assert get_args(parallel.All2AllBackend) == ("naive", "other")
    assert ParallelConfig.__annotations__ == annotations
    assert ParallelConfig("naive").is_checked
    with pytest.raises(pydantic.ValidationError):
        ParallelConfig("unknown")


@pytest.mark.usefixtures("other_vllm")
def test_who_chooses_it_in_python_learns_it_too(monkeypatch):
    monkeypatch.setattr(sys, "argv", OTHERS[0])

    class ParallelConfig:
        def __init__(self, all2all_backend: str = "other") -> None:
            self.all2all_backend = all2all_backend

    monkeypatch.setitem(sys.modules, "vllm.config.parallel", SimpleNamespace(ParallelConfig=ParallelConfig))
    register()
    init = ParallelConfig.__init__
    register()
    assert ParallelConfig.__init__ is init
    assert ParallelConfig(all2all_backend="naive").all2all_backend == "naive"
    with pytest.raises(UnsupportedError, match=r"0\.77\.0.*has no All2AllBackend"):
        ParallelConfig(all2all_backend="ep_a2a")


def test_without_vllm_nothing_happens(monkeypatch):
    monkeypatch.setattr(sys, "argv", OTHERS[0])
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    register()


def test_the_entry_point_is_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    value = declared["vllm.general_plugins"]["ep_a2a"]
    assert EntryPoint("ep_a2a", value, "vllm.general_plugins").load() is register
