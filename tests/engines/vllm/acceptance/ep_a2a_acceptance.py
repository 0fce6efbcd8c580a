"""vLLM's own tests of MoE layers with this backend, on GPUs: a pytest plugin that adds it to their lists.

    cd FOLDER
    PYTHONPATH=CHECKOUT/tests/engines/vllm/acceptance python -m pytest -p ep_a2a_acceptance -p no:cacheprovider \\
      -c pyproject.toml --confcutdir tests/kernels/moe --vllm-tests . \\
      tests/kernels/moe/test_modular_kernel_combinations.py tests/kernels/moe/test_moe_layer.py

FOLDER has `tests` and `pyproject.toml` of the source distribution of the vLLM that is installed, and nothing else; the
files conftest.py above tests/kernels/moe import much that these tests do not use:

    pip install pytest setuptools-scm setuptools-rust
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.26.0 \\
      pip download --no-deps --no-build-isolation --no-binary vllm vllm==0.26.0
    tar xzf vllm-0.26.0.tar.gz --wildcards 'vllm-0.26.0/tests/*' vllm-0.26.0/pyproject.toml

Options are those of pytest and of vLLM's tests: `-k TritonExperts`, `-k 2-1-True` for two data-parallel ranks of the
layer test, `--subtests ID,ID` for a few of its layers; and `--rank-timeout SECS` for how long a process may take.
No part of the package `tests`: vLLM's tests are a package of that name, too. Their processes import this module again.
"""

import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig

from ep_a2a.integrations.vllm import register
from ep_a2a.integrations.vllm.common import BACKEND_NAME

LAYER_TESTS = "tests.kernels.moe.test_moe_layer"
QUANTIZATIONS = {None, "fp8", "fp8_blocked", "modelopt_fp8"}
"""Of their layer test: all that do not need a GPU of a later generation than Hopper."""
PARALLELISM = (True, True, False, True)
"""Of their layer test: data parallel with experts and without, tensor parallel, sequence parallel.

Not tensor parallel alone: the name has no effect there, and half of their smallest layer is no whole block of fp8.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ep_a2a in vLLM's tests")
    group.addoption("--vllm-tests", type=Path, required=True, help="the folder with vLLM's folder tests")
    group.addoption("--rank-timeout", type=float, default=600, help="seconds that a process of a test may take")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("vllm_tests").resolve()
    if (folder / "vllm").exists():
        raise pytest.UsageError(f"{folder} has a vllm of its own, which would be tested instead of the installed one")
    sys.path.insert(0, str(folder))
    register()
    add_to_combinations()
    from tests.kernels.moe.modular_kernel_tools import parallel_utils

    parallel_utils.spawn = spawning(parallel_utils.spawn, config.getoption("rank_timeout"))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The last moment: after the module is imported, before pytest reads the lists that its tests are made from."""
    if metafunc.module.__name__ == LAYER_TESTS and BACKEND_NAME not in metafunc.module.BACKENDS:
        add_to_layers(metafunc.module)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of this backend."""
    others = [item for item in items if not is_ours(item)]
    items[:] = [item for item in items if is_ours(item)]
    config.hook.pytest_deselected(items=others)


def is_ours(item: pytest.Item) -> bool:
    from ep_a2a.integrations.vllm.prepare_finalize import EpA2APrepareAndFinalize

    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return (
        parameters.get("backend") == BACKEND_NAME or parameters.get("prepare_finalize_type") is EpA2APrepareAndFinalize
    )


def add_to_combinations() -> None:
    """Adds our prepare/finalize to those that their combinations of modular kernels are made of. Idempotent."""
    from tests.kernels.moe.modular_kernel_tools import mk_objects

    from ep_a2a.integrations.vllm.prepare_finalize import EpA2APrepareAndFinalize

    if EpA2APrepareAndFinalize not in mk_objects.PREPARE_FINALIZE_INFO:
        mk_objects.register_prepare_and_finalize(
            EpA2APrepareAndFinalize,
            mk_objects.standard_format,
            mk_objects.common_float_types,
            blocked_quantization_support=True,
            backend=BACKEND_NAME,
        )


def add_to_layers(module: Any) -> None:
    """Adds our backend to the lists of their layer test, in place: decorators hold them."""
    module.BACKENDS.append(BACKEND_NAME)
    module.BACKEND_SUPPORTED_QUANTS[BACKEND_NAME] = QUANTIZATIONS
    module.BACKEND_EP_DP_TP_SUPPORT[BACKEND_NAME] = PARALLELISM
    module.EPLB_SUPPORTED_BACKENDS.append(BACKEND_NAME)


def spawning(spawn: Callable[..., Any], timeout_secs: float) -> Callable[..., Any]:
    """Their way to start a process per rank, with a backend that is chosen and known in each of these processes."""

    def spawn_with_backend(worker: Callable[..., None], args: tuple[Any, ...], **options: Any) -> Any:
        for config in args:
            # they set the backend of a finished configuration; users pass it to the constructor
            if isinstance(config, VllmConfig) and config.parallel_config.all2all_backend == BACKEND_NAME:
                from ep_a2a.integrations.vllm.parallel_config import choose

                choose(config.parallel_config)
        return spawn(run_rank, args=(timeout_secs, worker, *args), **options)

    return spawn_with_backend


def run_rank(local_rank: int, timeout_secs: float, worker: Callable[..., None], *args: Any) -> None:
    """A process of their test. Where it waits for ever it ends with all threads' stacks, and so ends the test."""
    faulthandler.dump_traceback_later(timeout_secs, exit=True)
    add_to_combinations()
    worker(local_rank, *args)
