"""The private MPS daemon, with a script in the place of NVIDIA's program."""

import contextlib
import functools
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ep_a2a.testing import mps
from ep_a2a.testing.mps import Mps, MpsDaemon, find_mps
from tests.waiting import await_file, await_until

CONTROL = """#!/bin/sh
if [ "$1" = -f ]; then
    echo "$CUDA_VISIBLE_DEVICES" > "$CUDA_MPS_LOG_DIRECTORY/visible"
    echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
    mkfifo "$CUDA_MPS_PIPE_DIRECTORY/control"
    read line < "$CUDA_MPS_PIPE_DIRECTORY/control"
    echo "$line" >> "$FAKE_LOG"
else
    read line
    echo "$line" > "$CUDA_MPS_PIPE_DIRECTORY/control"
fi
"""
BROKEN = """#!/bin/sh
echo "An instance of this daemon is already running"
exit 1
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the daemon notes when it ends; its program is on the PATH. No folder is left where new ones are made."""
    folder, temporary = tmp_path / "bin", Path(tempfile.mkdtemp(prefix="mps"))
    folder.mkdir()
    (folder / mps.CONTROL).write_text(CONTROL)
    (folder / mps.CONTROL).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.delenv(mps.PIPE_VARIABLE, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_PIPE", tmp_path / "nobody")
    yield tmp_path / "log"
    temporary.rmdir()


def lstat_of(path: Path, planted: int) -> os.stat_result:
    """As lstat, but the file of this inode belongs to another user."""
    found = list(os.lstat(path))
    if found[stat.ST_INO] == planted:
        found[stat.ST_UID] = 12345
    return os.stat_result(found)


def test_a_daemon_starts_for_this_user_alone_and_ends_when_asked(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    daemon = MpsDaemon()
    assert daemon.failure == ""
    assert daemon.folder.stat().st_mode & 0o777 == 0o700
    assert daemon.variables[mps.PIPE_VARIABLE] == str(daemon.folder / "pipe")
    # clients choose among all GPUs themselves
    assert (daemon.folder / "log" / "visible").read_text() == "\n"
    daemon.close()
    daemon.close()
    assert log.read_text() == "quit -t 5\n"
    assert not daemon.folder.exists()


OWNER = """
import os, signal
from ep_a2a.testing.mps import MpsDaemon
daemon = MpsDaemon()
print(daemon.folder, flush=True)
signal.pause()
"""


FORKED_OWNER = OWNER.replace("signal.pause()", "os.fork()\nsignal.pause()")


@pytest.mark.parametrize("program", [OWNER, FORKED_OWNER], ids=["alone", "with a forked child"])
def test_a_killed_owner_leaves_nothing(log: Path, program: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True)
    folder = Path(owner.stdout.readline().strip())
    assert folder.is_dir()
    owner.kill()
    owner.wait()
    await_until(lambda: not folder.exists(), "the folder is removed")
    assert log.read_text() == "quit -t 5\n"
    owner.stdout.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(owner.pid, signal.SIGKILL)


def test_a_daemon_that_does_not_start_says_why(log: Path, tmp_path: Path) -> None:
    (tmp_path / "bin" / mps.CONTROL).write_text(BROKEN)
    daemon = MpsDaemon()
    assert daemon.failure == "An instance of this daemon is already running"
    assert daemon.variables == {}
    assert not daemon.folder.exists()


def test_a_users_own_daemon_comes_first(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_mps() is Mps.PRIVATE
    pipe = tmp_path / "nvidia-mps"
    pipe.mkdir()
    (pipe / f"{mps.CONTROL}.pid").write_text(str(os.getpid()))
    monkeypatch.setattr(mps, "DEFAULT_PIPE", pipe)
    # another process of that number
    assert find_mps() is Mps.PRIVATE
    monkeypatch.setenv(mps.PIPE_VARIABLE, str(pipe))
    assert find_mps() is Mps.SILENT
    (pipe / "control").touch()
    assert find_mps() is Mps.OF_THE_USER
    monkeypatch.delenv(mps.PIPE_VARIABLE)
    monkeypatch.setenv("PATH", "")
    assert find_mps() is Mps.NONE


def test_a_running_daemon_is_found_by_its_name(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = MpsDaemon()
    await_file(daemon.folder / "pipe" / "control")
    monkeypatch.setattr(mps, "DEFAULT_PIPE", daemon.folder / "pipe")
    assert find_mps() is Mps.OF_THE_USER
    # a link to it, and a folder or a file of another user
    link = tmp_path / "link"
    link.symlink_to(daemon.folder / "pipe")
    monkeypatch.setattr(mps, "DEFAULT_PIPE", link)
    assert find_mps() is Mps.PRIVATE
    for name in ("pipe", f"pipe/{mps.CONTROL}.pid", "pipe/control"):
        planted = (daemon.folder / name).lstat().st_ino
        with monkeypatch.context() as patched:
            patched.setattr(mps, "DEFAULT_PIPE", daemon.folder / "pipe")
            patched.setattr(Path, "lstat", functools.partialmethod(lstat_of, planted))
            assert find_mps() is Mps.PRIVATE
    daemon.close()
