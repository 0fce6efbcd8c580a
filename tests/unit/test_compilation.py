"""Who compiles which kernel first and once, and messages of long compilations, with kernels that are made up."""

import io
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import filelock
import pytest
import torch
import triton.language as tl

from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.kernels import compilation
from ep_a2a.kernels.compilation import compile_all
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.portable import portable
from tests.cases.configs import deepseek_v3


@dataclass
class FakeKernel:
    """Is built by a call of `work`."""

    name: str
    work: Callable[[], object] = lambda: None
    is_compiled: bool = False
    seen: list[str] = field(default_factory=list)

    @property
    def kernel(self) -> SimpleNamespace:
        return SimpleNamespace(cache_key="")

    @property
    def key(self) -> tuple[object, ...]:
        return self.kernel, self.name

    def refuse_capture(self) -> None:
        pass

    def build(self) -> str:
        self.work()
        self.seen.append(self.name)
        return self.name

    def load(self, built: str) -> None:
        assert built == self.name
        self.is_compiled = True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> io.StringIO:
    """The terminal of a program that has set no logging up: pytest has handlers."""
    stderr = io.StringIO()
    stderr.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(compilation, "sys", SimpleNamespace(stderr=stderr))
    monkeypatch.setattr(compilation, "logger", logging.Logger("alone"))  # noqa: LOG001
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return stderr


def config_of(rank: int = 0, gpu_per_node: int = 8) -> EpDispatchCombineConfig:
    kinds = EpDispatchCombineKernelType
    kernel_type = kinds.IntraNode if gpu_per_node == 8 else kinds.InterNodeV1
    return deepseek_v3(rank=rank, gpu_per_node=gpu_per_node, kernel_type=kernel_type)


def compiled(kernels: Sequence[FakeKernel], config: EpDispatchCombineConfig | None = None) -> None:
    compile_all([cast("CompiledKernel", kernel) for kernel in kernels], config or config_of())
    assert all(kernel.is_compiled for kernel in kernels)


class LongCompilation:
    """Kernels of which two are not built before the message about them has been given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said = threading.Event()
        announce = compilation._announce

        def announce_and_go_on(kernels: Any) -> None:
            announce(kernels)
            self.said.set()

        monkeypatch.setattr(compilation, "wait", self.wait)
        monkeypatch.setattr(compilation, "_announce", announce_and_go_on)

    def wait(self, started: Iterable[Future[Any]], _: float) -> SimpleNamespace:
        first, *rest = started
        first.result()
        return SimpleNamespace(not_done=rest)

    def run(self, config: EpDispatchCombineConfig | None = None) -> None:
        late = [FakeKernel(name, self.said.wait) for name in ("count", "combine")]
        compiled([FakeKernel("dispatch", is_compiled=True), FakeKernel("dispatch"), *late], config)


@pytest.fixture
def long_compilation(monkeypatch: pytest.MonkeyPatch) -> LongCompilation:
    return LongCompilation(monkeypatch)


def test_a_long_compilation_is_announced_once(
    terminal: io.StringIO, tmp_path: Path, long_compilation: LongCompilation
) -> None:
    long_compilation.run()
    assert terminal.getvalue() == (
        "ep_a2a: compiling for the first use: 2 of 3 kernels are left (combine, count); "
        f"{tmp_path} keeps them, so the next start is quick\n"
    )


def test_nothing_is_said_where_nothing_takes_long(terminal: io.StringIO) -> None:
    compiled([FakeKernel(str(place)) for place in range(100)])
    assert terminal.getvalue() == ""


@pytest.mark.parametrize(("rank", "num_cores", "num_threads"), [(0, 64, 2), (1, 64, 1), (7, 64, 1), (0, 8, 1)])
def test_no_thread_begins_with_a_kernel_of_another_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, num_cores: int, num_threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    started = Mock(wraps=ThreadPoolExecutor)
    monkeypatch.setattr(compilation, "ThreadPoolExecutor", started)
    compiled([FakeKernel(str(place)) for place in range(9)], config_of(rank))
    assert started.call_args.args[0] == num_threads


def test_an_error_ends_the_compilation() -> None:
    kernels = [FakeKernel("good"), FakeKernel("bad", lambda: 1 // 0), FakeKernel("good")]
    with pytest.raises(ZeroDivisionError):
        compile_all([cast("CompiledKernel", kernel) for kernel in kernels], config_of(0, 4))


def test_a_kernel_that_another_process_compiles_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its lock is taken first; whoever waits for it builds when it is free, or when patience ends."""
    compiled([FakeKernel("one")])
    (lock,) = tmp_path.glob("ep_a2a-*.lock")
    waits = threading.Event()
    acquire = filelock.FileLock.acquire

    def acquire_and_tell(self: Any, *args: Any, **options: Any) -> Any:
        waits.set()
        return acquire(self, *args, **options)

    kernel = FakeKernel("one")
    with ThreadPoolExecutor(1) as other:
        with filelock.FileLock(lock):
            monkeypatch.setattr(filelock.FileLock, "acquire", acquire_and_tell)
            building = other.submit(compiled, [kernel])
            assert waits.wait(30)
            assert kernel.seen == []
        building.result()
        monkeypatch.setattr(compilation, "LOCK_PATIENCE_SECS", 0.0)
        with filelock.FileLock(lock):
            other.submit(compiled, [FakeKernel("one")]).result()


def test_a_cache_without_locks_is_used_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    compiled([FakeKernel("one"), FakeKernel("two")])


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
def test_the_first_rank_of_each_node_speaks(
    terminal: io.StringIO, long_compilation: LongCompilation, rank: int, gpu_per_node: int, speaks: bool
) -> None:
    if not speaks:
        long_compilation.said.set()
    long_compilation.run(config_of(rank, gpu_per_node))
    assert ("compiling" in terminal.getvalue()) == speaks


def test_without_a_terminal_only_those_who_ask_read_it(
    monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO, long_compilation: LongCompilation
) -> None:
    terminal.isatty = lambda: False  # type: ignore[method-assign]
    long_compilation.run()
    assert terminal.getvalue() == ""
    monkeypatch.setenv("EP_A2A_LOG_LEVEL", "info")
    long_compilation.said.clear()
    long_compilation.run()
    assert "compiling" in terminal.getvalue()


def test_what_logging_shows_is_not_written_again(
    monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO, long_compilation: LongCompilation
) -> None:
    logger, shown = logging.Logger("own", logging.INFO), io.StringIO()  # noqa: LOG001
    logger.addHandler(logging.StreamHandler(shown))
    monkeypatch.setattr(compilation, "logger", logger)
    long_compilation.run()
    assert terminal.getvalue() == ""
    assert shown.getvalue().startswith("compiling for the first use")


@portable
def store_kernel(out, VALUE: tl.constexpr) -> None:
    tl.store(out, VALUE)


def test_kernels_have_names_and_say_whether_they_are_compiled() -> None:
    kernel = CompiledKernel(store_kernel, (torch.int32,), {"VALUE": 3}, 1)
    assert (kernel.name, kernel.is_compiled) == ("store", False)
