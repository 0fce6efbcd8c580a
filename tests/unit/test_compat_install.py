"""Whose module an import of another library gives."""

import importlib
import importlib.util
import operator
import pkgutil
import sys
from types import ModuleType

import pytest

import ep_a2a.compat.mori as compat
from ep_a2a.compat import deep_ep_sizes, install, installation, uninstall
from ep_a2a.errors import StateError, UnknownNameError, UnsupportedError
from tests.integration.programs import run_python, succeeded

LIBRARIES = tuple(installation.MODULES)
NAMES = {
    "mori": "ops.EpDispatchCombineOp shmem.shmem_npes ops.dispatch_combine.TOPK_IDX_DTYPE",
    "mori.ops.local_expert_count": "launch_local_expert_count",
    "mori.shmem.api": "shmem_malloc shmem_module_init",
    "mori.shmem.tensor_utils": "mori_shmem_create_tensor MoriShmemBuffer",
    "aiter": "init_dist_env destroy_dist_env get_hip_quant QuantType.per_128x128 dtypes.fp8 logger",
    "aiter.dist.parallel_state": "get_ep_group in_the_same_node_as init_dist_env",
    "aiter.dist.device_communicators.base_device_communicator": "All2AllManagerBase Cache DeviceCommunicatorBase",
    "aiter.dist.device_communicators.communicator_cuda": "CudaCommunicator",
    "aiter.dist.device_communicators.all2all": (
        "MoriAll2AllManager NaiveAll2AllManager AgRsAll2AllManager PPLXAll2AllManager DeepEPHTAll2AllManager "
        "DeepEPLLAll2AllManager FlashInferAllToAllManager"
    ),
    "deep_ep": "Buffer Config EventOverlap",
    "deep_ep.utils": "EventHandle EventOverlap",
    "triton_dist.layers.nvidia": "EPLowLatencyAllToAllLayer",
    "triton_dist.layers.nvidia.ep_ll_a2a_layer": "EPLowLatencyAllToAllLayer DispatchMetaInfo",
    "triton_dist.kernels.nvidia": "dispatch_kernel_v2 combine_kernel_v2 create_ep_ll_a2a_ctx",
    "triton_dist.kernels.nvidia.low_latency_all_to_all_v2": (
        "dispatch_kernel_v2 LowlatencyDispatchContext LowlatencyCombineContext DispatchMetaInfo"
    ),
    "triton_dist.utils": (
        "initialize_distributed init_nvshmem_by_torch_process_group is_shmem_initialized finalize_distributed "
        "nvshmem_barrier_all_on_stream nvshmem_create_tensor nvshmem_free_tensor_sync dist_print"
    ),
}
"""What documents import, by module."""


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    yield
    uninstall(*LIBRARIES)
    assert not [name for name in sys.modules if name.partition(".")[0] in LIBRARIES]


@pytest.mark.parametrize("libraries", [LIBRARIES, *((library,) for library in LIBRARIES)])
def test_names_of_the_documents(libraries):
    install(*libraries)
    install(*libraries)
    for module, names in NAMES.items():
        if module.partition(".")[0] not in libraries:
            continue
        package = importlib.import_module(module.partition(".")[0])
        for path in names.split():
            below = operator.attrgetter(".".join([*module.split(".")[1:], path]))(package)
            assert operator.attrgetter(path)(importlib.import_module(module)) is below
        assert importlib.util.find_spec(module) is not None


def test_aiters_managers_have_its_base():
    install("aiter")
    base = importlib.import_module("aiter.dist.device_communicators.base_device_communicator").All2AllManagerBase
    module = "aiter.dist.device_communicators.all2all"
    managers = operator.attrgetter(*NAMES[module].split())(importlib.import_module(module))
    assert len(managers) == 7
    assert all(issubclass(each, base) for each in managers)


def test_a_library_that_is_installed_keeps_its_name(tmp_path, monkeypatch):
    (tmp_path / "aiter.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StateError, match=r"aiter\.py.*replace=True"):
        install("mori", "aiter")
    assert not {"mori", "aiter"} & set(sys.modules)
    install("aiter", replace=True)
    assert importlib.import_module("aiter").QuantType
    uninstall("aiter")
    assert not hasattr(importlib.import_module("aiter"), "QuantType")
    del sys.modules["aiter"]


def test_a_folder_without_a_package_is_no_library(tmp_path, monkeypatch):
    """As a clone beside the script is, whose package lies one folder deeper."""
    (tmp_path / "aiter" / "aiter").mkdir(parents=True)
    (tmp_path / "aiter" / "aiter" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    install("aiter")
    assert importlib.import_module("aiter").QuantType


def test_an_error_leaves_all_names_and_the_edition(monkeypatch):
    before = deep_ep_sizes.edition()
    monkeypatch.setitem(installation.MODULES, "aiter", {"aiter": "ep_a2a.compat.absent"})
    with pytest.raises(ImportError, match="absent"):
        install("mori", "aiter", deep_ep_edition=2025 if before == 2026 else 2026)
    assert not {"mori", "aiter"} & set(sys.modules)
    assert deep_ep_sizes.edition() == before


@pytest.mark.parametrize("name", ["pplx", "morri", "ep_a2a"])
def test_other_libraries_have_no_counterpart(name):
    install("mori")
    for call in (install, uninstall):
        with pytest.raises(UnknownNameError, match=f"mori, aiter, deep_ep, triton_dist; got '{name}'"):
            call("mori", name)
        assert sys.modules["mori"] is compat


def test_modules_below_ours_are_found_by_the_librarys_name():
    install("mori")
    for module in pkgutil.walk_packages(compat.__path__, "mori."):
        ours = module.name.replace("mori", "ep_a2a.compat.mori", 1)
        assert importlib.import_module(module.name) is importlib.import_module(ours)


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        *((f"import {name}", "docs/mori.md") for name in ("mori.io", "mori.ccl", "mori.ops.dispatch_combine_v2")),
        ("import mori.cpp", "mori.ops"),
        ("from mori import cpp", "mori.ops"),
        ("import mori; mori.cpp", "mori.ops"),
        ("from aiter.fused_moe import fused_moe", "your own experts"),
        ("import aiter.test_common", "ep-a2a bench"),
        ("from aiter.dist.parallel_state import get_pp_group", "docs/atom.md"),
        ("from deep_ep_cpp import Config", "from deep_ep"),
        ("from deep_ep import LowLatencyBuffer", "deep_ep.Buffer"),
        ("import deep_ep; deep_ep.LowLatencyBuffer", "deep_ep.Buffer"),
        ("from triton_dist import jit", "triton.jit"),
        ("import triton_dist; triton_dist.jit", "triton.jit"),
        ("import triton_dist.language.extra", "triton.language"),
        ("from triton_dist.profiler_utils import perf_func", "enable_profiling"),
        ("from triton_dist.utils import sleep_async", "docs/triton_distributed.md"),
        ("from triton_dist.kernels.nvidia import ag_gemm", "docs/triton_distributed.md"),
    ],
)
def test_names_that_there_are_not_have_a_remedy(statement, remedy):
    install(*LIBRARIES)
    # what try-import and hasattr catch
    kind = AttributeError if "; " in statement else ModuleNotFoundError
    with pytest.raises(kind) as caught:
        exec(statement, {})
    assert isinstance(caught.value, UnsupportedError)
    assert remedy in caught.value.remedy
    assert caught.value.got in statement.replace(" import ", ".") + statement


def test_other_names_stay_absent_as_they_were():
    with pytest.raises(AttributeError, match=r"mori\.io\. docs/mori\.md"):
        _ = compat.io
    assert {"ops", "shmem", "install"} <= set(dir(compat))
    install("mori")
    for name in ("deep_ep_cpp", "aiter.fused_moe", "mori_cpp"):
        with pytest.raises(ModuleNotFoundError, match="No module named"):
            importlib.import_module(name)
    uninstall("mori")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("mori.io")


def test_a_name_that_was_given_by_hand_counts_as_ours(monkeypatch):
    monkeypatch.setitem(sys.modules, "mori", compat)
    install("mori")
    assert importlib.import_module("mori.ops") is compat.ops
    uninstall("mori")
    assert sys.modules.pop("mori") is compat


def test_an_imported_library_is_replaced_on_request_and_given_back(monkeypatch):
    another = {name: ModuleType(name) for name in ("mori", "mori.ops", "mori.io")}
    for name, module in another.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(StateError, match="replace=True"):
        compat.install()
    assert sys.modules["mori"] is another["mori"]
    compat.install(replace=True)
    assert importlib.import_module("mori") is compat
    assert "mori.io" not in sys.modules
    for _ in range(2):
        compat.uninstall()
        assert {name: sys.modules[name] for name in another} == another
    for name in another:
        del sys.modules[name]


def test_the_name_alone_is_light():
    printed = succeeded(
        run_python(
            "-c",
            "import sys, ep_a2a.compat.mori as mori\n"
            "print('torch' in sys.modules)\n"
            "mori.install()\n"
            "import mori\n"
            "print('triton' in sys.modules)\n",
        )
    )
    assert printed.split() == ["False", "False"]
