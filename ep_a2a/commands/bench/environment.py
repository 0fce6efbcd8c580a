"""Where and with what a benchmark ran: without this its numbers mean nothing."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ep_a2a

QUERY_TIMEOUT_SECS = 20.0
CPU_NOTE = "on CPU, in Triton's interpreter: these times say nothing about GPUs"


def describe(device: str) -> dict[str, Any]:
    """Versions, machine, commit, command and time, for the first line of a report. No CUDA context is made.

    Args:
        device: "cpu" or "cuda".
    """
    record: dict[str, Any] = {
        "record": "header",
        "ep_a2a": ep_a2a.__version__,
        "commit": commit(),
        "command": " ".join(["ep-a2a", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }
    if device == "cpu":
        return record | {"note": CPU_NOTE, "cpu": platform.processor() or platform.machine()}
    gpus = _query("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return record | {
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "driver": ", ".join(sorted({line.rpartition(", ")[2] for line in gpus})),
        "gpus": [line.rpartition(", ")[0] for line in gpus],
    }


def commit() -> str | None:
    """Commit of the checkout that this package lies in, "-dirty" with changes on top; None where there is none."""
    folder = str(Path(ep_a2a.__file__).parent)
    return _query("git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*").strip() or None


def _nccl_version() -> str:
    numbers: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, numbers))


def _triton_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def _query(*command: str) -> str:
    """What a program prints; "" where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_SECS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
