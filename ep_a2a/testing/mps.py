"""A private MPS daemon, so that kernels of several processes run on one GPU at the same time.

NVIDIA's Multi-Process Service needs no rights and changes no setting of a GPU. Without it processes take turns.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

from ep_a2a import env
from ep_a2a.testing import mps_watchdog

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPE = Path("/tmp/nvidia-mps")
PREFIX = "ep_a2a_mps_"
LONGEST_FOLDER = 80
"""Characters; the daemon's sockets lie below the folder, and their paths have fewer than 108."""
END_SECS = 2 * mps_watchdog.END_SECS + mps_watchdog.QUIT_SECS


class Mps(enum.Enum):
    """How processes that share a GPU get at it."""

    PRIVATE = "through a private MPS daemon"
    OF_THE_USER = "through the MPS daemon that runs already"
    NONE = f"by time slices, which is slow: there is no {CONTROL}"
    SILENT = f"by time slices, which is slow: no MPS daemon listens in {PIPE_VARIABLE}"
    UNWANTED = "by time slices, as asked"

    @property
    def at_once(self) -> bool:
        """Whether kernels of several processes run at the same time."""
        return self in (Mps.PRIVATE, Mps.OF_THE_USER)


def find_mps() -> Mps:
    """Returns how this process's children can share a GPU. A daemon that the user runs comes first."""
    if named := env.other_variable(PIPE_VARIABLE):
        return Mps.OF_THE_USER if Path(named, "control").exists() else Mps.SILENT
    if _daemon_runs(DEFAULT_PIPE):
        return Mps.OF_THE_USER
    return Mps.PRIVATE if shutil.which(CONTROL) else Mps.NONE


def _daemon_runs(pipe: Path) -> bool:
    """Whether the process that a daemon's folder names is a daemon."""
    try:
        process = int((pipe / f"{CONTROL}.pid").read_text())
        # The kernel cuts names to 15 characters.
        return Path("/proc", str(process), "comm").read_text().strip() == CONTROL[:15]
    except (OSError, ValueError):
        return False


class MpsDaemon:
    """A daemon of this process's own; ends with `close`, and with this process however that ends.

    Attributes:
        variables: what its clients must have in their environment before they first use CUDA.
        failure: why there is none; "" where it runs.
    """

    def __init__(self) -> None:
        control = shutil.which(CONTROL) or CONTROL
        remove_orphans(control)
        self.folder = _make_folder()
        program = [sys.executable, "-I", str(mps_watchdog.__file__), str(self.folder), control]
        self._watchdog = subprocess.Popen(
            program,
            env=_environment_of(self.folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        _daemons.add(self)
        assert self._watchdog.stdout is not None
        said = self._watchdog.stdout.readline().decode(errors="replace").strip()
        self.failure = "" if said == mps_watchdog.READY else said or "its watchdog ended"
        self.variables = _variables_of(self.folder)
        if self.failure:
            self.variables = {}
            self.close()

    def close(self) -> None:
        """Ends the daemon; idempotent. Its clients should have ended."""
        for pipe in (self._watchdog.stdin, self._watchdog.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        try:
            self._watchdog.wait(END_SECS)
        except subprocess.TimeoutExpired:
            logger.warning(
                "the watchdog of the MPS daemon in %s (process %d) does not end", self.folder, self._watchdog.pid
            )

    def leave_to_parent(self) -> None:
        """Lets go of the pipe whose end ends the daemon; for a forked child, which may outlive its parent."""
        if self._watchdog.stdin is not None:
            self._watchdog.stdin.close()


_daemons: weakref.WeakSet[MpsDaemon] = weakref.WeakSet()


def _leave_daemons_to_parent() -> None:
    for daemon in _daemons:
        daemon.leave_to_parent()


os.register_at_fork(after_in_child=_leave_daemons_to_parent)


def _variables_of(folder: Path) -> dict[str, str]:
    """Returns what names a folder's daemon to its clients."""
    return {PIPE_VARIABLE: str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}


def _environment_of(folder: Path) -> dict[str, str]:
    """Returns the environment of a folder's daemon, and of what talks to it."""
    # Clients choose among all GPUs by their own variable; one set here would renumber them.
    kept = {name: value for name, value in env.all_variables().items() if name != "CUDA_VISIBLE_DEVICES"}
    return kept | _variables_of(folder)


def _make_folder() -> Path:
    """Returns a new folder with `pipe` and `log`, for this user alone."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(str(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    for name in ("pipe", "log"):
        (folder / name).mkdir(mode=0o700)
    return folder


def remove_orphans(control: str) -> list[Path]:
    """Ends the daemons of this user whose watchdog was killed, and removes their folders; returns those."""
    removed = []
    for parent in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(parent).glob(f"{PREFIX}*"):
            if _is_orphan(folder):
                mps_watchdog.quit_daemon(control, _environment_of(folder))
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_orphan(folder: Path) -> bool:
    """Whether a folder is this user's alone and names a process that is gone."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return False
        record = json.loads((folder / mps_watchdog.RECORD).read_text())
        now = mps_watchdog.identity_of(int(record["process"]))
        return bool(now["namespace"] == record["namespace"] and now["started_at"] != record["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
