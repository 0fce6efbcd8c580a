"""Markers and tiers, the pools of rank processes, and the check that nothing is left in /dev/shm."""

import contextlib
import gc
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_a2a.testing import RankPool
from tests.allowed_skips import pytest_addoption as pytest_addoption
from tests.allowed_skips import pytest_make_collect_report as pytest_make_collect_report
from tests.allowed_skips import pytest_runtest_makereport as pytest_runtest_makereport
from tests.markers import needs_gpus
from tests.multigpu.used_variants import compiled_when_used
from tests.resume import leave_out_passed, note
from tests.shared_files import process_of, shared_files
from tests.tiers import is_quick
from tests.waiting import happens

# A file whose name does not say whose it is may be another session's, for an instant; a leak stays.
LEAK_PATIENCE_SECS = 10.0
# Ranks of all pools together; one that waits takes no time, and about 100 MB.
MAX_RANKS = 16
SEED = 20240229

TESTS = Path(__file__).parent
MARKED_FOLDERS = ("multiprocess", "multigpu", "netns", "integration")
# What one folder or file has to itself when several workers run tests: GPUs, a network, what its fixtures have built.
ONE_WORKER = {"multigpu": "GPUs", "netns": "networks"}
ONE_WORKER_PER_FILE = ("integration",)

# a machine that has come for the GPU tests alone may lack it
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # a loaded machine makes any example slow, and drawing it, too
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


# before pytest-xdist looks for groups, and before `-m` chooses
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_passed(config, items)
    for item in items:
        if not item.path.is_relative_to(TESTS):
            continue
        path = item.path.relative_to(TESTS)
        folder = path.parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if folder == "multigpu":
            item.add_marker(needs_gpus(1))
        if not is_quick(path.as_posix(), getattr(item, "originalname", item.name)):
            item.add_marker("full")
        group = str(path) if folder in ONE_WORKER_PER_FILE else ONE_WORKER.get(folder)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """What has been imported stays: the collector need not look at it again, which would take a tenth of all time."""
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note(report)


COMPILE_WHEN_USED = "EP_A2A_TEST_COMPILE_WHEN_USED"
"""With 1, ops of tests on GPUs compile a kernel when a call first needs it, which are far fewer kernels."""
POOL_SECS = 240.0
"""Bound of a call of a pool's ranks; on two cores the longest takes a minute."""
MPS = "EP_A2A_TEST_MPS"
"""With 0, ranks of tests that share a GPU take turns: compute-sanitizer refuses clients of MPS."""


class _Pools:
    """The most recently used pools: starting one costs a second, keeping many costs memory."""

    def __init__(self) -> None:
        self._pools: OrderedDict[tuple[int, str], RankPool] = OrderedDict()

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu", **kwargs: Any
    ) -> list[Any]:
        """`function(rank_context, *args, **kwargs)` on every rank; the results in rank order."""
        key = (world_size, device)
        if key not in self._pools:
            while self._pools and world_size + sum(size for size, _ in self._pools) > MAX_RANKS:
                self._pools.popitem(last=False)[1].close()
            self._pools[key] = RankPool(
                world_size, device=device, timeout_secs=POOL_SECS, mps=os.environ.get(MPS) != "0"
            )
        self._pools.move_to_end(key)
        if device == "cuda" and os.environ.get(COMPILE_WHEN_USED) == "1":
            return self._pools[key].run(compiled_when_used, function, *args, **kwargs)
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


@pytest.fixture
def compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops compile all that calls can reach when they are built, as a user's do: graphs that are captured need it."""
    monkeypatch.delenv(COMPILE_WHEN_USED, raising=False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A command that runs in this process sends the package's logger to stderr: the next test starts without."""
    logger = logging.getLogger("ep_a2a")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture(autouse=True)
def _nothing_left_in_shared_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    if not any(request.node.get_closest_marker(name) for name in ("multiprocess", "multigpu")):
        yield
        return
    before = _files_of_ours()
    yield
    if not happens(lambda: _files_of_ours() <= before, LEAK_PATIENCE_SECS):
        pytest.fail(f"left in shared memory: {', '.join(sorted(_files_of_ours() - before))}")


def _files_of_ours() -> set[str]:
    """Files of this worker's processes and of dead ones; another worker looks for what its own have left."""
    return {name for name in shared_files() if _is_ours_or_dead(process_of(name))}


def _is_ours_or_dead(process: str) -> bool:
    ancestors = [process]
    try:
        while ancestors[-1] not in ("0", "1"):
            # "pid (name) state parent ...", where a name may hold anything
            stat = Path("/proc", ancestors[-1], "stat").read_text()
            ancestors.append(stat.rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return True
    # an orphan is anybody's
    return str(os.getpid()) in ancestors or ancestors[1:] == ["1"]
