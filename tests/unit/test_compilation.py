"""Who compiles which kernel first, and messages of long compilations, with kernels that are made up."""

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import triton.language as tl

from ep_a2a import clock
from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.kernels import compilation
from ep_a2a.kernels.compilation import ANNOUNCE_AFTER_SECS, LOADING_SECS, compile_all
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.portable import portable
from tests.cases.configs import deepseek_v3

LONG_SECS = ANNOUNCE_AFTER_SECS + 1


class Time:
    """Stands in for the clock; passes only while a kernel is compiled."""

    now = 0.0


@dataclass
class FakeKernel:
    """Takes `secs` to compile."""

    name: str
    secs: float = 0.0
    is_compiled: bool = False
    seen: list[str] | None = None

    def compile(self) -> None:
        Time.now += self.secs
        self.is_compiled = True
        if self.seen is not None:
            self.seen.append(self.name)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The terminal of a program that has set no logging up: pytest has handlers."""
    stderr = io.StringIO()
    stderr.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(compilation, "sys", SimpleNamespace(stderr=stderr))
    monkeypatch.setattr(clock, "now", lambda: Time.now)
    monkeypatch.setattr(compilation, "logger", logging.Logger("alone"))  # noqa: LOG001
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/cache")
    return stderr


def config_of(rank: int = 0, gpu_per_node: int = 8) -> EpDispatchCombineConfig:
    kinds = EpDispatchCombineKernelType
    kernel_type = kinds.IntraNode if gpu_per_node == 8 else kinds.InterNodeV1
    return deepseek_v3(rank=rank, gpu_per_node=gpu_per_node, kernel_type=kernel_type)


def compiled(kernels: Sequence[FakeKernel], config: EpDispatchCombineConfig | None = None) -> None:
    compile_all([cast("CompiledKernel", kernel) for kernel in kernels], config or config_of())
    assert all(kernel.is_compiled for kernel in kernels)


def long_compilation() -> list[FakeKernel]:
    done = FakeKernel("dispatch", LONG_SECS, is_compiled=True)
    return [done, FakeKernel("dispatch", LONG_SECS), *(FakeKernel(name, LONG_SECS) for name in ("count", "combine"))]


def test_a_long_compilation_is_announced_once(terminal: io.StringIO) -> None:
    compiled(long_compilation())
    assert terminal.getvalue() == (
        "ep_a2a: compiling for the first use: 2 of 3 kernels are left (combine, count); "
        "/somewhere/cache keeps them, so the next start is quick\n"
    )


@pytest.mark.parametrize(("num_kernels", "secs"), [(2, ANNOUNCE_AFTER_SECS), (100, LOADING_SECS), (0, 0.0)])
def test_nothing_is_said_where_nothing_takes_long(terminal: io.StringIO, num_kernels: int, secs: float) -> None:
    """Of many kernels in a warm cache each is quick."""
    compiled([FakeKernel("quick", secs) for _ in range(num_kernels)])
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(
    ("rank", "gpu_per_node", "order"),
    [
        (0, 8, [0, 8, 1, 2, 3, 4, 5, 6, 7, 9]),
        (1, 8, [1, 9, 2, 3, 4, 5, 6, 7, 0, 8]),
        # nodes have disks of their own
        (6, 4, [2, 6, 3, 0, 1, 7, 4, 5, 8, 9]),
    ],
)
def test_ranks_of_a_node_compile_their_shares_first(rank: int, gpu_per_node: int, order: list[int]) -> None:
    seen: list[str] = []
    compiled([FakeKernel(str(place), seen=seen) for place in range(10)], config_of(rank, gpu_per_node))
    assert seen == [str(place) for place in order]


@pytest.mark.parametrize(
    ("rank", "gpu_per_node", "speaks"), [(0, 8, True), (4, 4, True), (1, 8, False), (3, 4, False), (5, 4, False)]
)
def test_the_first_rank_of_each_node_speaks(terminal: io.StringIO, rank: int, gpu_per_node: int, speaks: bool) -> None:
    compiled(long_compilation(), config_of(rank, gpu_per_node))
    assert ("compiling" in terminal.getvalue()) == speaks


def test_without_a_terminal_only_those_who_ask_read_it(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO) -> None:
    terminal.isatty = lambda: False  # type: ignore[method-assign]
    compiled(long_compilation())
    assert terminal.getvalue() == ""
    monkeypatch.setenv("EP_A2A_LOG_LEVEL", "info")
    compiled(long_compilation())
    assert "compiling" in terminal.getvalue()


def test_what_logging_shows_is_not_written_again(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO) -> None:
    logger, shown = logging.Logger("own", logging.INFO), io.StringIO()  # noqa: LOG001
    logger.addHandler(logging.StreamHandler(shown))
    monkeypatch.setattr(compilation, "logger", logger)
    compiled(long_compilation())
    assert terminal.getvalue() == ""
    assert shown.getvalue().startswith("compiling for the first use")


@portable
def store_kernel(out, VALUE: tl.constexpr) -> None:
    tl.store(out, VALUE)


def test_kernels_have_names_and_say_whether_they_are_compiled() -> None:
    kernel = CompiledKernel(store_kernel, (torch.int32,), {"VALUE": 3}, 1)
    assert (kernel.name, kernel.is_compiled) == ("store", False)
