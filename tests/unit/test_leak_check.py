"""The check of tests/conftest.py that nothing is left in shared memory: whose files count."""

from __future__ import annotations

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


def test_files_of_another_worker_do_not():
    # the parent of this process is alive, and not below it
    assert not _is_ours_or_dead(str(os.getppid()))
