"""Asks the machine: runs programs such as nvidia-smi and git for their output, and looks up versions of packages."""

import subprocess
from importlib import metadata

COMMAND_SECS = 20.0


def command_output(*command: str) -> str:
    """Returns what a program prints; "" where it is missing, fails or takes longer than COMMAND_SECS."""
    none = subprocess.DEVNULL
    try:
        return subprocess.check_output(
            command, stdin=none, stderr=none, text=True, errors="replace", timeout=COMMAND_SECS
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def package_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
