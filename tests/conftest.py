"""Markers by folder, the pools of rank processes, and the check that nothing is left in /dev/shm."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ep_a2a.testing import RankPool
from tests.markers import needs_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED_MEMORY = Path("/dev/shm")
FILE_PREFIX = "ep_a2a_"
# Another test session on this machine may have a file there for an instant; a leak stays.
LEAK_PATIENCE_SECS = 2.0
MAX_POOLS = 2
SEED = 20240229

TESTS = Path(__file__).parent
MARKED_FOLDERS = ("multiprocess", "multigpu", "netns", "integration")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if folder == "multigpu":
            item.add_marker(needs_gpus(2))


class _Pools:
    """The most recently used pools: starting one costs seconds, keeping many costs memory."""

    def __init__(self) -> None:
        self._pools: OrderedDict[tuple[int, str], RankPool] = OrderedDict()

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu", **kwargs: Any
    ) -> list[Any]:
        """`function(rank_context, *args, **kwargs)` on every rank; the results in rank order."""
        key = (world_size, device)
        if key not in self._pools:
            while len(self._pools) >= MAX_POOLS:
                self._pools.popitem(last=False)[1].close()
            self._pools[key] = RankPool(world_size, device=device)
        self._pools.move_to_end(key)
        return self._pools[key].run(function, *args, **kwargs)

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


@pytest.fixture(scope="session")
def _pools() -> Iterator[_Pools]:
    pools = _Pools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(_pools: _Pools) -> Callable[..., list[Any]]:
    """`ranks(function, world_size, *args, device="cpu", **kwargs)`: the results in rank order."""
    return _pools.run


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    if not any(request.node.get_closest_marker(name) for name in ("multiprocess", "multigpu")):
        yield
        return
    before = _our_files()
    yield
    deadline = time.monotonic() + LEAK_PATIENCE_SECS
    while (left := _our_files() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        pytest.fail(f"left in {SHARED_MEMORY}: {', '.join(sorted(left))}")


def _our_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY.glob(f"{FILE_PREFIX}*")} if SHARED_MEMORY.is_dir() else set()
