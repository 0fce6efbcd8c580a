"""Messages of long compilations, from kernels that are made up; one test asks the real compiler."""

import io
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton.language as tl
from triton import knobs

from ep_a2a.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from ep_a2a.kernels import compilation
from ep_a2a.kernels.compilation import compile_all
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.portable import portable
from tests.cases.configs import deepseek_v3
from tests.offline_compile import compile_offline
from tests.waiting import await_until

SHORT_SECS, ANNOUNCE_AFTER_SECS = 0.05, 0.3
LOOK_SECS = 0.01
"""By the real clock."""
SAID = threading.Event()
"""Set once the watcher of the newest `compiled` has said what it has to say."""


class Time:
    """Stands in for the watcher's time, which passes only where a kernel takes some, and makes its events."""

    def __init__(self) -> None:
        self.now = 0.0
        self.changed = threading.Condition()

    def pass_by(self, secs: float) -> None:
        with self.changed:
            self.now += secs
            self.changed.notify_all()

    def event(self) -> Any:
        is_set = False

        def set_it() -> None:
            nonlocal is_set
            with self.changed:
                is_set = True
                self.changed.notify_all()

        def wait(secs: float) -> bool:
            with self.changed:
                end = self.now + secs
                self.changed.wait_for(lambda: is_set or self.now >= end)
            return is_set

        return SimpleNamespace(set=set_it, wait=wait)


TIME = Time()


@dataclass
class FakeKernel:
    """Takes `secs` to compile, or until the watcher has spoken, and lets Triton's listener know."""

    name: str
    secs: float = 0.0
    until_said: bool = False
    cache_hit: bool = False
    is_compiled: bool = False
    seen: list[Any] = field(default_factory=list)

    def compile(self) -> None:
        self.take_time()
        self.seen.append(self.name)
        if knobs.compilation.listener is not None:
            facts: dict[str, Any] = {"src": None, "metadata": {}, "metadata_group": {}, "times": None}
            knobs.compilation.listener(cache_hit=self.cache_hit, **facts)
        self.is_compiled = True

    def take_time(self) -> None:
        TIME.pass_by(self.secs)
        if self.until_said:
            await_until(lambda: SAID.is_set() or TIME.pass_by(ANNOUNCE_AFTER_SECS), "the watcher speaks")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "ANNOUNCE_AFTER_SECS", ANNOUNCE_AFTER_SECS)
    monkeypatch.setattr(compilation, "POLL_SECS", 0.01)
    monkeypatch.setattr(compilation, "time", SimpleNamespace(monotonic=lambda: TIME.now))
    monkeypatch.setattr(compilation, "threading", SimpleNamespace(Event=TIME.event, Thread=threading.Thread))
    announce = compilation._announce

    def announce_and_note(text: str) -> None:
        announce(text)
        SAID.set()

    monkeypatch.setattr(compilation, "_announce", announce_and_note)
    # as in a program that has set no logging up: pytest has handlers
    monkeypatch.setattr(compilation, "logger", logging.Logger("alone"))  # noqa: LOG001


def config_of(rank: int = 0, gpu_per_node: int = 8) -> EpDispatchCombineConfig:
    kinds = EpDispatchCombineKernelType
    kernel_type = kinds.IntraNode if gpu_per_node == 8 else kinds.InterNodeV1
    return deepseek_v3(rank=rank, gpu_per_node=gpu_per_node, kernel_type=kernel_type)


def compiled(kernels: Sequence[FakeKernel], config: EpDispatchCombineConfig | None = None) -> None:
    SAID.clear()
    compile_all([cast("CompiledKernel", kernel) for kernel in kernels], config or config_of())


def announced(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None], stderr: io.StringIO | None = None) -> str:
    """What is written to stderr, a terminal unless another one is given."""
    stderr = stderr or Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    work()
    return stderr.getvalue()


def test_a_long_compilation_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [
        FakeKernel("dispatch", is_compiled=True),
        FakeKernel("combine", until_said=True),
        FakeKernel("combine"),
        FakeKernel("count"),
    ]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/cache")
    text = announced(monkeypatch, lambda: compiled(kernels))
    assert text == (
        "ep_a2a: compiling for the first use: 3 of 3 kernels are left (combine, count); "
        "/somewhere/cache keeps them, so the next start is quick\n"
    )
    assert [kernel.seen for kernel in kernels] == [[], ["combine"], ["combine"], ["count"]]


def test_what_is_done_already_is_not_counted_as_left(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [FakeKernel("dispatch", SHORT_SECS), FakeKernel("combine", until_said=True)]
    assert "1 of 2 kernels are left (combine)" in announced(monkeypatch, lambda: compiled(kernels))


@pytest.mark.parametrize(
    ("num_kernels", "cache_hit"),
    # from a warm cache: many, each of them quick
    [(1, False), (8, True), (0, False)],
    ids=["short", "cached", "none"],
)
def test_nothing_is_said_where_nothing_takes_long(
    num_kernels: int, cache_hit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [FakeKernel("quick", SHORT_SECS, cache_hit=cache_hit) for _ in range(num_kernels)]
    assert announced(monkeypatch, lambda: compiled(kernels)) == ""
    assert all(kernel.is_compiled for kernel in kernels)


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


def test_the_first_rank_of_each_node_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def text_of(kernel: FakeKernel, rank: int, gpu_per_node: int) -> str:
        return announced(monkeypatch, lambda: compiled([kernel], config_of(rank, gpu_per_node)))

    for rank, gpu_per_node in ((0, 8), (4, 4)):
        assert text_of(FakeKernel("combine", until_said=True), rank, gpu_per_node).startswith("ep_a2a: compiling")
    # others have no watcher at all
    monkeypatch.setattr(compilation.threading, "Thread", None)
    for rank, gpu_per_node in ((1, 8), (3, 4), (5, 4)):
        assert text_of(FakeKernel("combine"), rank, gpu_per_node) == ""


def test_without_a_terminal_only_those_who_ask_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def text() -> str:
        return announced(monkeypatch, lambda: compiled([FakeKernel("combine", until_said=True)]), io.StringIO())

    assert text() == ""
    monkeypatch.setenv("EP_A2A_LOG_LEVEL", "info")
    assert text().startswith("ep_a2a: compiling")


def test_what_logging_shows_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, shown = logging.Logger("own", logging.INFO), io.StringIO()  # noqa: LOG001
    logger.addHandler(logging.StreamHandler(shown))
    monkeypatch.setattr(compilation, "logger", logger)
    assert announced(monkeypatch, lambda: compiled([FakeKernel("combine", until_said=True)])) == ""
    assert shown.getvalue().startswith("compiling for the first use")


def test_another_listener_stays_and_hears_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []

    def listen(*, cache_hit: bool, **facts: Any) -> None:
        heard.append(cache_hit)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    compiled([FakeKernel("a"), FakeKernel("b", cache_hit=True)])
    assert heard == [False, True]
    assert knobs.compilation.listener is listen


def test_an_error_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no")

    kernel = FakeKernel("combine")
    monkeypatch.setattr(kernel, "compile", fail)
    with pytest.raises(ValueError, match="no"):
        compiled([kernel])
    assert knobs.compilation.listener is None


@portable
def store_kernel(out, VALUE: tl.constexpr) -> None:
    tl.store(out, VALUE)


@dataclass
class OfflineKernel(FakeKernel):
    """Compiles for a GPU that is not there, by Triton's own compiler; does nothing once the watcher has spoken."""

    def compile(self) -> None:
        if not SAID.is_set():
            compile_offline(store_kernel, (torch.zeros(1, dtype=torch.int32),), {"VALUE": 3}, 1)
            TIME.pass_by(self.secs)
            SAID.wait(LOOK_SECS)
        self.is_compiled = True


def test_tritons_compiler_says_what_comes_from_its_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilation, "ANNOUNCE_AFTER_SECS", 1.0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def text(num_kernels: int) -> str:
        kernels = [OfflineKernel("store", 2 * SHORT_SECS) for _ in range(num_kernels)]
        return announced(monkeypatch, lambda: compiled(kernels))

    # none takes long, so the watcher has to hear that one was compiled
    assert f"{tmp_path} keeps them" in text(300)
    # the second time everything is there, and loading each is quick
    assert text(12) == ""


def test_kernels_have_names_and_say_whether_they_are_compiled() -> None:
    kernel = CompiledKernel(store_kernel, (torch.int32,), {"VALUE": 3}, 1)
    assert (kernel.name, kernel.is_compiled) == ("store", False)
