"""Asks the machine: runs programs such as nvidia-smi and git for their output, and looks up versions of packages."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata

COMMAND_SECS = 20.0


def command_output(*command: str, timeout_secs: float = COMMAND_SECS) -> str:
    """Returns what a program prints; "" where it is missing, fails or takes longer than `timeout_secs`."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_secs,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def package_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
