"""Runs one MPS daemon until SIGTERM, or until its owner ends: python mps_watchdog.py OWNER FOLDER CONTROL.

OWNER is the number of the process that starts this one. FOLDER has `pipe` and `log`, which the environment names to the
daemon. This file is run as a program and imports nothing of the package, so that it starts at once.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

START_SECS = 20.0
QUIT_SECS = 5
"""Seconds that clients have to end before the daemon ends their server."""
END_SECS = 15.0
POLL_SECS = 0.02
OWNER_POLL_SECS = 0.2
READY = "ready"
"""What this program prints once the daemon answers."""


def quit_daemon(control: str) -> None:
    """Asks the daemon that the environment names to end; does nothing where none answers."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [control],
            input=f"quit -t {QUIT_SECS}\n",
            text=True,
            timeout=END_SECS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


def children_of(process: int) -> list[int]:
    """Returns the process's children."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(path.parent.name))
    return found


def end(daemon: subprocess.Popen[bytes], control: str, folder: Path) -> None:
    """Ends the daemon and its server, by force where they do not end when they are asked."""
    servers = children_of(daemon.pid)
    quit_daemon(control)
    try:
        daemon.wait(END_SECS)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def answers(daemon: subprocess.Popen[bytes], folder: Path) -> bool:
    """Returns whether the daemon has made the place where clients reach it, within START_SECS."""
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline and daemon.poll() is None:
        if (folder / "pipe" / "control").exists():
            return True
        time.sleep(POLL_SECS)
    return False


def main(owner: int, folder: Path, control: str) -> int:
    """Starts the daemon, prints READY, and ends it when it is time. Returns the exit code."""
    # Ctrl-C reaches the whole terminal session; the owner decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (folder / "log" / "daemon.txt").open("w") as log:
        daemon = subprocess.Popen(
            [control, "-f"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    # From here on SIGTERM is noticed by sigtimedwait alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    is_ready = answers(daemon, folder)
    said = READY if is_ready else (folder / "log" / "daemon.txt").read_text().strip() or "it did not answer"
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()
    while is_ready and os.getppid() == owner and not signal.sigtimedwait({signal.SIGTERM}, OWNER_POLL_SECS):
        pass
    end(daemon, control, folder)
    return 0 if is_ready else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
