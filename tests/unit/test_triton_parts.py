"""A Triton that lacks a private name ends in an error with a remedy, and its own defaults change no kernel."""

import ctypes
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter, jit

from ep_a2a.errors import UnsupportedError
from ep_a2a.kernels import triton_parts
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.portable import portable

FUSION_VARIABLE = "TRITON_DEFAULT_FP_FUSION"


@portable
def multiply_and_add_kernel(values, out):
    left, right = tl.load(values), tl.load(values + 1)
    tl.store(out, left * right + tl.load(values + 2))


class HopperDriver:
    """As much of Triton's driver as compilation needs, for a GPU that this machine lacks."""

    utils = SimpleNamespace(unload_module=lambda module: None)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "_active", HopperDriver())
    multiply_and_add_kernel.device_caches.clear()


def compiled() -> Any:
    tensor = torch.zeros(4)
    return multiply_and_add_kernel.warmup(tensor, tensor, grid=(1,))


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.usefixtures("hopper")
def test_the_environment_does_not_choose_how_sums_are_rounded(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv(FUSION_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(FUSION_VARIABLE, value)
    found = compiled()
    assert found.metadata.enable_fp_fusion is False
    assert "fma" not in found.asm["ptx"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (interpreter, "GridExecutor"),
        (interpreter.GridExecutor, "_init_args_hst"),
        (interpreter.GridExecutor, "_restore_args_dev"),
        (interpreter, "InterpretedFunction"),
        (interpreter, "interpreter_builder"),
        (interpreter, "_get_np_dtype"),
        (jit, "JITFunction"),
    ],
)
def test_a_private_name_that_is_gone_is_an_error_with_a_remedy(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(UnsupportedError, match=name) as caught:
        runpy.run_path(triton_parts.__file__)
    assert caught.value.got == f"Triton {triton.__version__}"
    assert triton_parts.WORKING_VERSIONS in caught.value.remedy


def test_a_module_that_is_gone_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UnsupportedError, match="no_such_module") as caught:
        triton_parts.module("triton.runtime.no_such_module")
    assert triton_parts.WORKING_VERSIONS in caught.value.remedy


def test_a_compiled_kernel_without_a_launcher_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(multiply_and_add_kernel, "warmup", lambda *args, **options: SimpleNamespace())
    kernel = CompiledKernel(multiply_and_add_kernel, (torch.float32, torch.float32), {}, num_warps=4)
    with pytest.raises(UnsupportedError, match="_init_handles"):
        kernel.compile()


@pytest.mark.parametrize(("shares_sm", "code", "asked"), [(False, 0, []), (True, 0, [(7, 9, 100)]), (True, 1, None)])
def test_a_kernel_that_shares_multiprocessors_asks_for_shared_memory(
    monkeypatch: pytest.MonkeyPatch, shares_sm: bool, code: int, asked: list[tuple[int, int, int]] | None
) -> None:
    calls = []

    def set_attribute(function: ctypes.c_void_p, name: int, value: int) -> int:
        calls.append((function.value, name, value))
        return code

    made = SimpleNamespace(_init_handles=lambda: None, function=7, n_regs=96, packed_metadata=(), run=print)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuFuncSetAttribute=set_attribute))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(multiply_and_add_kernel, "warmup", lambda *args, **options: made)
    kernel = CompiledKernel(
        multiply_and_add_kernel, (torch.float32, torch.float32), {}, num_warps=4, shares_sm=shares_sm
    )
    if asked is None:
        with pytest.raises(RuntimeError, match="CUDA error 1"):
            kernel.compile()
    else:
        kernel.compile()
        assert calls == asked
