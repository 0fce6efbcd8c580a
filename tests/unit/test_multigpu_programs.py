"""Programs for machines with GPUs, which no test of a machine without GPUs runs, import what there is."""

import importlib

import pytest


@pytest.mark.parametrize(
    "name", ["tests.multigpu.precompile", "tests.programs.soak", "bench.vllm.rank", "tests.engines.vllm.gpu.rank"]
)
def test_it_imports(name: str) -> None:
    importlib.import_module(name)
