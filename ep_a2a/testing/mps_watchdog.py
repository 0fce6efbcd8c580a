"""Runs one MPS daemon for as long as this process's stdin is open: python mps_watchdog.py FOLDER CONTROL.

FOLDER has `pipe` and `log`, which the environment names to the daemon.

The process that holds the other end of stdin may be killed; its end of the pipe closes then, too. This file is run as a
program and imports nothing of the package, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import json
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
RECORD = "owner.json"
READY = "ready"
"""What this program prints once the daemon answers."""


def started_at(process: int) -> str:
    """Returns when a process started, in the kernel's ticks; "" where there is none of this number."""
    try:
        # "pid (name) state parent ...", where a name may hold anything
        return Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def identity_of(process: int) -> dict[str, int | str]:
    """Returns what tells a process from all others of this host: a number may serve again, and in each container."""
    namespace = Path("/proc/self/ns/pid").readlink()
    return {"process": process, "started_at": started_at(process), "namespace": str(namespace)}


def quit_daemon(control: str, environment: dict[str, str] | None = None) -> None:
    """Asks a daemon to end; does nothing where none answers. The environment names it, by default this process's."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [control],
            input=f"quit -t {QUIT_SECS}\n",
            text=True,
            env=environment,
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


def main(folder: Path, control: str) -> int:
    """Starts the daemon, prints READY, and ends it when stdin ends. Returns the exit code."""
    # Ctrl-C reaches the whole terminal session; the pipe decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / RECORD).write_text(json.dumps(identity_of(os.getpid())))
    with (folder / "log" / "daemon.txt").open("w") as log:
        daemon = subprocess.Popen(
            [control, "-f"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    if answers(daemon, folder):
        sys.stdout.write(f"{READY}\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()
        end(daemon, control, folder)
        return 0
    sys.stdout.write(f"{(folder / 'log' / 'daemon.txt').read_text().strip() or 'it did not answer'}\n")
    end(daemon, control, folder)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
