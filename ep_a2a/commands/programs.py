"""Runs other programs, such as nvidia-smi and git, for their output."""

from __future__ import annotations

import shutil
import subprocess

COMMAND_SECS = 20.0


def command_output(*command: str) -> str:
    """Returns what a program prints; "" where it is missing, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
