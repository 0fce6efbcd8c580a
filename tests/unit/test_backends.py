"""Capabilities, libraries and what is worked out around libraries' results, and the document that is made of them."""

import contextlib
import functools
import inspect
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ep_a2a.cli.app import app
from ep_a2a.commands.bench.contenders import make_contender
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.compat import deep_ep, mori
from ep_a2a.config.handle_kwargs import EXTRA_KWARGS
from ep_a2a.errors import MissingPackageError, UnsupportedError
from ep_a2a.integrations.atom import activation
from ep_a2a.interface import DispatchResult
from ep_a2a.managers.capabilities import TABLES, Capabilities, device_problem
from ep_a2a.managers.external import conversions, deepep
from ep_a2a.managers.external.flashinfer import FlashInferOneSidedOp, FlashInferTwoSidedOp
from ep_a2a.managers.external.library import Library
from ep_a2a.managers.external.mori import LIBRARY as MORI
from ep_a2a.managers.external.mori import MoriOp
from ep_a2a.managers.external.pplx import PplxOp
from ep_a2a.managers.registry import aliases_of, available_backends, create_manager, manager_type
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.gpus import refuse_other_gpus
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.ops.adapter import KERNEL_FIELDS, AdapterOp
from ep_a2a.ops.arguments import CombineArguments, Step
from ep_a2a.ops.collective import CollectiveDispatchCombineOp
from ep_a2a.routing import count_ids
from tests.cases.configs import deepseek_v3
from tests.cases.tables import read_table

OPS = (
    CollectiveDispatchCombineOp,
    MoriOp,
    deepep.DeepEPHighThroughputOp,
    deepep.DeepEPLowLatencyOp,
    deepep.DeepEPV2Op,
    FlashInferOneSidedOp,
    FlashInferTwoSidedOp,
    PplxOp,
)


config = functools.partial(
    deepseek_v3, world_size=4, hidden_dim=2048, max_num_inp_token_per_rank=16, num_experts_per_rank=8
)


# --- names ---


def test_vllms_and_moris_names_are_taken():
    names = set(available_backends()) | {alias for name in available_backends() for alias in aliases_of(name)}
    assert names >= {
        "mori",
        "mori_high_throughput",
        "mori_low_latency",
        "deepep_high_throughput",
        "deepep_low_latency",
        "deepep_v2",
        "pplx",
        "flashinfer_all2allv",
        "flashinfer_nvlink_one_sided",
        "flashinfer_nvlink_two_sided",
        "naive",
        "allgather_reducescatter",
        "ep_a2a",
    }
    assert manager_type("flashinfer_all2allv") is manager_type("flashinfer_nvlink_two_sided")
    for name in available_backends():
        manager = manager_type(name)
        assert manager.backend == name


@pytest.mark.parametrize("kind", OPS)
def test_ops_of_other_backends_have_the_interface_of_ours(kind: type) -> None:
    assert issubclass(kind, AdapterOp)
    assert not inspect.isabstract(kind)
    for name, member in inspect.getmembers(EpDispatchCombineOp):
        if not name.startswith("_") and name != "get_launch_config" and inspect.isfunction(member):
            other = inspect.signature(getattr(kind, name))
            assert list(inspect.signature(member).parameters) == list(other.parameters), name


# --- capabilities ---


@pytest.mark.parametrize(("can", "changes", "said"), read_table("configs")["beyond_a_backend"])
def test_what_a_backend_cannot_do_is_said(can: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    refusal = Capabilities(**can).refusal("some", config(**changes), 1)
    with pytest.raises(UnsupportedError, match=rf"{said}.*backend 'some' can do.*; got .*\. \w"):
        raise refusal


@pytest.mark.parametrize("num_rows", [0, 2])
def test_empty_weights_are_those_of_no_rows_or_none(num_rows):
    """A library may return exactly the rows that came, and a rank without any combines as the others do."""
    config, none = deepseek_v3(), torch.empty(0)
    rows = torch.empty(num_rows, config.hidden_dim, dtype=config.combined_dtype)
    ids = torch.empty(0, config.topk, dtype=torch.int32)
    step = Step(none, None, None, ids, 1)
    step.dispatched = DispatchResult(rows, None, None, ids, none)
    op = SimpleNamespace(
        config=config, device=rows.device, _is_registered=lambda _: False, _check_weights=lambda _: None
    )
    args = CombineArguments(rows, torch.empty(0, config.topk), None)
    AdapterOp._prepare_combine(op, step, args)
    assert (args.weights is None) == (num_rows > 0)


def test_what_a_backend_can_do_is_not_refused():
    assert Capabilities().refusal("some", config(), 2) is None
    only = Capabilities(layouts=("compact",), hidden_sizes=(2048,), topks=(8,), max_topk=8, even_experts=True)
    assert only.refusal("some", config(), 1) is None
    assert Capabilities(single_node=True).refusal("some", config(), 1) is None
    assert "2 nodes" in str(Capabilities(single_node=True).refusal("some", config(), 2))
    assert "index 1" in str(Capabilities(micro_batches=False).refusal("some", config(), 1, 1))
    casts = Capabilities(combine_casts=("fp8_blockwise",), combine_casts_between_nodes=False)
    assert "2 nodes" in str(casts.refusal("some", config(quant_type="fp8_blockwise"), 2))
    cast = replace(Capabilities(), scales_per_128=True)
    assert cast.refusal("some", config(quant_type="fp8_per_1x128"), 1) is None


def test_every_capability_is_in_a_table():
    titles = [(each.metadata["table"], each.metadata["title"]) for each in fields(Capabilities)]
    assert len(set(titles)) == len(titles)
    assert {table for table, _ in titles} == set(TABLES)


def test_every_backend_says_where_it_has_run():
    for name in available_backends():
        manager = manager_type(name)
        assert manager.capabilities.was_run, name
        assert (manager.library is None) == manager.capabilities.runs_on_cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_what_a_machine_lacks_is_said():
    assert device_problem(Capabilities(runs_on_cpu=True), "cpu") is None
    assert device_problem(Capabilities(gpus=("AMD",)), "cpu") == "does not run on CPU: needs AMD GPUs"
    assert device_problem(Capabilities(), "cuda") == "no GPU found: needs NVIDIA GPUs"


@pytest.fixture
def amd_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")


@pytest.mark.usefixtures("amd_gpu")
def test_an_amd_gpu_is_refused_by_name_and_reason(monkeypatch):
    own = manager_type("ep_a2a")
    found = device_problem(own.capabilities, "cuda")
    assert found == (
        "found AMD Instinct MI300X, on AMD's build of torch: needs NVIDIA GPUs "
        "(AMD GPUs: compiled for gfx942 and gfx950, never run)"
    )
    assert device_problem(own.capabilities, "cpu") is None
    assert device_problem(Capabilities(gpus=("NVIDIA", "AMD")), "cuda") is None
    words = r"compiled \(gfx942, gfx950\), and have never run.*MI300X.*allgather_reducescatter"
    with pytest.raises(UnsupportedError, match=words):
        Arena(None, torch.device("cuda", 0), rendezvous=SimpleNamespace(telling=contextlib.nullcontext))
    # on CPU the kernels run by Triton's interpreter
    refuse_other_gpus("cpu")
    monkeypatch.setenv("EP_A2A_BACKEND", "ep_a2a")
    with pytest.raises(UnsupportedError, match=words):
        activation.activate()
    reached = []
    monkeypatch.setattr(activation, "on_import", lambda *names, **_: reached.extend(names))
    for backend in ("naive", "allgather_reducescatter", "mori"):
        monkeypatch.setenv("EP_A2A_BACKEND", backend)
        assert activation.activate()
    assert len(reached) == 3


def test_a_kwarg_is_a_kernels_own_or_goes_into_every_backend():
    everywhere = {
        "layout",
        "num_experts",
        "dispatch_quant_type",
        "scale_format",
        "combine_dtype",
        "max_total_recv_tokens",
        "local_ids",
        "on_rank_loss",
        "use_external_inp_buf",
    }
    assert set(EXTRA_KWARGS) - everywhere == set(KERNEL_FIELDS)
    assert not set(KERNEL_FIELDS) & everywhere
    assert all(kind.takes <= set(KERNEL_FIELDS) for kind in OPS)


def test_local_ids_are_refused_where_ids_are_global():
    config = deepseek_v3(rank=0, layout="rank_major", local_ids=True)
    assert "local_ids=True" in str(Capabilities().refusal("others", config, 1))
    assert Capabilities(local_ids=True).refusal("ours", config, 1) is None


# --- libraries ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that packages can be imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def package(folder: Path, name: str, source: str, version: str) -> None:
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_missing_library_names_what_was_found_and_the_remedy(folder):
    library = Library("absent_peer", "absent-peer", "pip install absent-peer")
    assert library.problem() == "absent-peer is not installed"
    with pytest.raises(MissingPackageError, match=r"import absent_peer.*not installed.*pip install absent-peer"):
        library.load()


def test_a_library_that_cannot_be_imported_names_its_error(folder):
    package(folder, "broken_peer", "raise OSError('libsome.so: not found')", "1.2")
    library = Library("broken_peer", "broken_peer", "build it")
    assert library.problem() == (
        "broken_peer 1.2 is installed, but import broken_peer raised OSError: libsome.so: not found"
    )


def test_a_library_that_is_too_old_or_lacks_something_is_named(folder):
    package(folder, "old_peer", "there = 1", "0.9.post1")
    assert Library("old_peer", "old_peer", "", "0.10").problem() == (
        "old_peer 0.9.post1 is installed, and 0.10 or later is needed"
    )
    assert Library("old_peer", "old_peer", "", "0.9", (":there",)).problem() is None
    assert Library("old_peer", "old_peer", "", needs=(":gone",)).problem() == (
        "old_peer 0.9.post1 is installed, and has no old_peer.gone"
    )
    assert Library("old_peer", "old_peer", "").load().there == 1


def test_our_mori_is_not_mori(monkeypatch):
    monkeypatch.delitem(sys.modules, "mori", raising=False)
    before = MORI.problem()
    mori.install()
    try:
        assert MORI.problem() == "mori is ep_a2a's own stand-in in this process, ep_a2a.compat.mori, not the library"
        with pytest.raises(MissingPackageError, match=r"own stand-in.*'ep_a2a', or .*pip install 'amd-mori>=1.2.1'"):
            create_manager("mori", None)  # type: ignore[arg-type]
        with pytest.raises(MissingPackageError, match="own stand-in"):
            MORI.load("ops")
    finally:
        mori.uninstall()
    assert MORI.problem() == before


def test_our_deep_ep_is_not_deep_ep(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)  # as docs/deepep.md says
    for library in (deepep.BUFFER, deepep.ELASTIC_BUFFER):
        assert "own stand-in in this process, ep_a2a.compat.deep_ep" in (library.problem() or "")
    # nor is it measured under the name
    reason = make_contender("deepep").unavailable(Workload(2, 1), torch.device("cuda"))
    assert (reason or "").startswith(deepep.BUFFER.problem() or "?")


def test_a_manager_on_our_modules_names_them():
    """As MORI's manager on CPU does in tests/multiprocess/test_backend_parity.py."""
    assert Library("ep_a2a", "ep-a2a", "", needs=MORI.needs).problem() is None


# --- what libraries return ---


def test_padding_and_global_ids():
    local = torch.tensor([[0, -1], [1, 0], [7, 7]])
    ids = conversions.global_ids(local, 4, -9)
    assert ids.tolist() == [[4, -9], [5, 4], [11, 11]]
    assert ids.dtype == torch.int32
    assert conversions.padded_ids(ids, torch.tensor([2]), -1).tolist() == [[4, -9], [5, 4], [-1, -1]]
    assert conversions.valid_ids(torch.tensor([-1, 0, 7, 8]), 8).tolist() == [False, True, True, False]


def test_counts_and_positions():
    counts = conversions.counts_from_prefix(torch.tensor([2, 2, 5], dtype=torch.int32))
    assert counts.tolist() == [2, 0, 3]
    sources = conversions.sources_of_rows(counts)
    assert sources.tolist() == [0, 0, 2, 2, 2]
    tokens = torch.tensor([1, 3, 0, 1, 5], dtype=torch.int32)
    assert conversions.positions(sources, tokens, 100).tolist() == [1, 3, 200, 201, 205]
    ids = torch.tensor([[4, 5], [4, -1], [3, 8]], dtype=torch.int32)
    assert count_ids(ids, 4, 3).tolist() == [2, 1, 0]


def test_rows_by_source_of_deepeps_ranges():
    """First row << 32 | rows, as its tests/legacy/test_low_latency.py reads them."""
    ranges = torch.tensor([[(0 << 32) | 2, (2 << 32) | 1], [(0 << 32) | 0, (0 << 32) | 4]])
    assert conversions.rows_per_source(ranges).tolist() == [2, 5]


# --- the command ---


def test_the_command_prints_json():
    done = CliRunner().invoke(app, ["backends", "--json"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert list(printed) == list(available_backends())
    assert printed["naive"]["available"]
    assert printed["mori"]["aliases"] == ["mori_high_throughput"]
    for each in printed.values():
        assert each["available"] == (not each["problems"])


def test_the_command_prints_all_of_all():
    done = CliRunner().invoke(app, ["backends", "--verbose"], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    for text in ("Backends on this machine", *TABLES.values(), "pplx", "DeepEP"):
        assert text in done.stdout
