"""A private MPS daemon, so that kernels of several processes run on one GPU at the same time.

NVIDIA's Multi-Process Service needs no rights and changes no setting of a GPU. Without it processes take turns.
"""

import enum
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from ep_a2a import env
from ep_a2a.memory.gpus import DEFAULT_PIPE as DEFAULT_PIPE
from ep_a2a.memory.gpus import PIPE_VARIABLE as PIPE_VARIABLE
from ep_a2a.path_security import is_trusted
from ep_a2a.testing import mps_watchdog

logger = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
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


def find_mps() -> Mps:
    """Returns how this process's children can share a GPU. A daemon that this user or root runs comes first."""
    if named := env.other_variable(PIPE_VARIABLE):
        return Mps.OF_THE_USER if Path(named, "control").exists() else Mps.SILENT
    if _daemon_runs(DEFAULT_PIPE):
        return Mps.OF_THE_USER
    return Mps.PRIVATE if shutil.which(CONTROL) else Mps.NONE


def _daemon_runs(pipe: Path) -> bool:
    """Whether the process that a daemon's folder names is a daemon, and nobody else has made the folder."""
    pid_file = pipe / f"{CONTROL}.pid"
    try:
        places = [place.lstat() for place in (pipe, pid_file, pipe / "control")]
        if any(stat.S_ISLNK(place.st_mode) or not is_trusted(place) for place in places):
            return False
        process = int(pid_file.read_text())
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
        self.folder = _make_folder()
        self.variables = {PIPE_VARIABLE: str(self.folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log")}
        # Clients choose among all GPUs by their own variable; one set here would renumber them.
        kept = {name: value for name, value in env.all_variables().items() if name != "CUDA_VISIBLE_DEVICES"}
        program = [sys.executable, "-I", str(mps_watchdog.__file__), str(os.getpid()), str(self.folder)]
        self._watchdog = subprocess.Popen(
            [*program, shutil.which(CONTROL) or CONTROL],
            env=kept | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._watchdog.stdout is not None
        with self._watchdog.stdout as stdout:
            said = stdout.readline().decode(errors="replace").strip()
        self.failure = "" if said == mps_watchdog.READY else said or "its watchdog ended"
        if self.failure:
            self.variables = {}
            self.close()

    def close(self) -> None:
        """Ends the daemon; idempotent. Its clients should have ended."""
        self._watchdog.terminate()
        try:
            self._watchdog.wait(END_SECS)
        except subprocess.TimeoutExpired:
            place, process = self.folder, self._watchdog.pid
            logger.warning("the watchdog of the MPS daemon in %s (process %d) does not end", place, process)


def _make_folder() -> Path:
    """Returns a new folder with `pipe` and `log`, for this user alone."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    if len(str(folder)) > LONGEST_FOLDER:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    for name in ("pipe", "log"):
        (folder / name).mkdir(mode=0o700)
    return folder
