"""The check of tests/conftest.py that nothing is left in shared memory: whose files count."""

import os
import subprocess
import sys

from tests.conftest import _is_ours_or_dead


def test_files_of_this_worker_and_of_the_dead_count():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert _is_ours_or_dead(str(os.getpid()))
    assert _is_ours_or_dead(str(child.pid))
    child.communicate(b"\n")
    assert _is_ours_or_dead(str(child.pid))


def test_files_of_another_worker_do_not(monkeypatch):
    # two workers of one parent, which is this process: in a container its own parent may be process 1
    workers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    monkeypatch.setattr(os, "getpid", lambda: workers[0].pid)
    assert _is_ours_or_dead(str(workers[0].pid))
    assert not _is_ours_or_dead(str(workers[1].pid))
    for worker in workers:
        worker.communicate(b"\n")
