"""The harness itself: results, failures, hangs, and nothing left behind."""

import itertools
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_a2a.errors import ClosedError, ConfigError, ShapeError
from ep_a2a.memory import private_files
from ep_a2a.testing import RankFailure, RankPool, launch, run_ranks, worker

ROOT = Path(__file__).resolve().parents[2]
END_SECS = 60
HANG_SECS = 3
"""Long enough for a rank that has imported this module to answer on a busy machine."""


def describe(context, offset, *, scale=1):
    total = torch.tensor([context.rank * scale])
    dist.all_reduce(total, group=context.group)
    return context.rank + offset, context.world_size, str(context.device), int(total), torch.get_num_threads()


def return_view(context):
    rows = torch.arange(1 << 20, dtype=torch.float32).view(-1, 4)
    return {"row": rows[context.rank, 1:3].requires_grad_(), "fp8": rows[:2].to(torch.float8_e4m3fn)}


def raise_on(context, failing_rank):
    # all ranks are in here when one fails
    dist.barrier(group=context.group)
    if context.rank == failing_rank:
        raise ShapeError("two dimensions", "three")
    dist.barrier(group=context.group)


def raise_unpicklable(context):
    class LocalError(Exception):
        pass

    raise LocalError(f"from rank {context.rank}")


def hang_on(context, hanging_rank):
    if context.rank == hanging_rank:
        signal.pause()
    return context.rank


def die_on(context, dying_rank):
    if context.rank == dying_rank:
        os.kill(os.getpid(), signal.SIGKILL)


def return_what_cannot_travel(_context):
    return threading.Lock()


def process_id(_context):
    return os.getpid()


def value_of(_context, name):
    return os.environ.get(name)


def running(process_ids):
    return [pid for pid in process_ids if Path(f"/proc/{pid}").exists()]


def pool_folders(owner):
    """Folders of the pools that a process has."""
    return {path for path in private_files.private_folder().glob(f"*_{owner}_*") if path.is_dir()}


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout_secs=60) as pool:
        # the first call of fresh ranks imports this module, sooner on one than on another
        pool.run(process_id)
        yield pool


def test_results_come_in_rank_order(pool):
    assert pool.run(describe, 10, scale=3) == [(10, 2, "cpu", 3, 1), (11, 2, "cpu", 3, 1)]


def test_processes_are_reused(pool):
    assert pool.run(process_id) == pool.run(process_id)


def test_tensors_travel_by_value(pool):
    for rank, result in enumerate(pool.run(return_view)):
        assert result["row"].tolist() == [4.0 * rank + 1, 4.0 * rank + 2]
        assert result["row"].untyped_storage().nbytes() == 8
        assert result["fp8"].dtype == torch.float8_e4m3fn


def test_one_rank_raising_names_it_and_does_not_wait_for_the_others(pool, monkeypatch):
    monkeypatch.setattr(pool, "grace_secs", 1)
    # on a busy machine the rank that waits may take longer to write its stack
    monkeypatch.setattr(launch, "STACKS_TIMEOUT_SECS", 20)
    given_up = "rank 1 of 2 failed; rank 0 of 2 had not finished within 1 s of the failure of rank 1"
    with pytest.raises(RankFailure, match=given_up) as caught:
        pool.run(raise_on, 1)
    assert isinstance(caught.value.errors[1], ShapeError)
    assert caught.value.errors[1].expected == "two dimensions"
    assert caught.value.unfinished == (0,)
    assert "in raise_on" in caught.value.tracebacks[1]
    assert "in raise_on" in caught.value.tracebacks[0]
    assert pool.run(process_id)


def test_errors_that_cannot_be_pickled_come_as_text(pool):
    with pytest.raises(RankFailure, match="LocalError: from rank 0") as caught:
        pool.run(raise_unpicklable)
    assert caught.value.errors == {}
    assert sorted(caught.value.tracebacks) == [0, 1]
    with pytest.raises(RankFailure, match="cannot pickle"):
        pool.run(return_what_cannot_travel)


def test_ranks_have_the_environment_of_the_moment(pool, monkeypatch):
    name = "EP_A2A_TEST_OF_THE_ENVIRONMENT"
    pool.run(process_id)
    for value in ("first", "second"):
        monkeypatch.setenv(name, value)
        assert run_ranks(value_of, 1, name) == [value]
    monkeypatch.delenv(name)
    assert run_ranks(value_of, 1, name) == [None]


def test_a_hanging_rank_is_killed_and_named(pool, tmp_path, monkeypatch):
    # the server of forks keeps its socket where tempfile pointed when it started
    pool.run(process_id)
    # a place of its own, since other sessions on this machine have pools too
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children_before = set(multiprocessing.active_children())
    before = pool_folders(os.getpid())
    with RankPool(2) as hanging:
        # the first call of fresh ranks imports this module, which may take longer than the bound on a busy machine
        first = hanging.run(process_id)
        patience_secs, hanging.timeout_secs = hanging.timeout_secs, HANG_SECS
        with pytest.raises(RankFailure, match=f"rank 1 of 2 had not finished within {HANG_SECS} s") as caught:
            hanging.run(hang_on, 1)
        assert caught.value.unfinished == (1,)
        assert "in hang_on" in caught.value.tracebacks[1]
        assert not running(first)
        hanging.timeout_secs = patience_secs
        second = hanging.run(process_id)
        assert not set(first) & set(second)
        assert len(pool_folders(os.getpid()) - before) == 1
    assert not running(second)
    assert set(multiprocessing.active_children()) <= children_before
    assert not list(tmp_path.iterdir())
    assert pool_folders(os.getpid()) == before


def test_a_dying_rank_is_named():
    with RankPool(2) as dying:
        # the rank that lives must end its call while it is waited for, so it imports this module before
        dying.run(process_id)
        with pytest.raises(RankFailure, match="exit code -9") as caught:
            dying.run(die_on, 0)
    assert sorted(caught.value.tracebacks) == [0]


NUM_PLANTED = 2000
HOLD_A_POOL = """
import sys
from ep_a2a.testing import RankPool
from tests.multiprocess.test_launch import process_id
with RankPool(2) as pool:
    print(*pool.run(process_id), flush=True)
    sys.stdin.read()
"""


USE_A_POOL = """
import sys
from ep_a2a.testing import launch
from tests.multiprocess.test_launch import value_of
if __name__ == "__main__":
    context = launch._process_context(sys.argv[1])
    launch._process_context = lambda _: context
    print(launch.run_ranks(value_of, 1, "PYTHONSAFEPATH"))
"""


def test_ranks_of_a_killed_owner_end_and_remove_its_folder():
    with subprocess.Popen([sys.executable, "-c", HOLD_A_POOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        ranks = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        (folder,) = pool_folders(owner.pid)
        # its removal takes longer than the end of a rank
        for number in range(NUM_PLANTED):
            (folder / str(number)).touch()
        owner.kill()
        for rank in ranks:
            # readable when the process has ended
            assert select.select([rank], [], [], END_SECS)[0]
            os.close(rank)
    assert not pool_folders(owner.pid)


def test_a_file_that_a_rank_writes_during_the_removal_goes_too(tmp_path, monkeypatch):
    folder = tmp_path / "pool"
    folder.mkdir()
    remove = os.rmdir

    def rmdir(*args, **options):
        monkeypatch.setattr(os, "rmdir", remove)
        (folder / "rendezvous").touch()
        remove(*args, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    worker._remove(folder)
    assert not folder.exists()


def test_a_folder_that_cannot_be_removed_is_left_after_a_while(tmp_path, monkeypatch):
    """As where it belongs to another user."""
    clock = itertools.count()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: next(clock)), raising=False)
    tries = []

    def refused(folder, **options):
        tries.append(folder)
        assert len(tries) < 100

    monkeypatch.setattr(shutil, "rmtree", refused)
    worker._remove(tmp_path)
    assert len(tries) > 1


PLANTED = "import os; open(os.environ['PLANTED_RAN'], 'w').close()"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_files_of_the_current_folder_do_not_run(device, tmp_path):
    """A CUDA pool spawns its ranks: without a GPU, its way to start processes is tried on CPU."""
    program = tmp_path / "program" / "program.py"
    current = tmp_path / "current"
    for folder in (program.parent, current):
        folder.mkdir()
    program.write_text(USE_A_POOL)
    for name in ("selectors", "signal", "random", "pickle", "torch", "sitecustomize"):
        (current / f"{name}.py").write_text(PLANTED)
    ran = tmp_path / "ran"
    variables = os.environ | {"PLANTED_RAN": str(ran), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program, device], cwd=current, env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[None]\n"
    assert not ran.exists()


def test_misuse():
    pool = RankPool(1)
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.run(process_id)
    with pytest.raises(ConfigError):
        RankPool(0)
    with pytest.raises(ConfigError):
        RankPool(1, device="tpu")
