"""Describes the machine, versions and command of a benchmark, without which its numbers mean nothing."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ep_a2a
from ep_a2a.commands.programs import command_output

CPU_NOTE = "on CPU, in Triton's interpreter: these times say nothing about GPUs"


def describe(device: str) -> dict[str, Any]:
    """Returns versions, machine, commit, command and time, for the first line of a report. Makes no CUDA context.

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
    gpus = command_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return record | {
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
        "driver": ", ".join(sorted({line.rpartition(", ")[2] for line in gpus})),
        "gpus": [line.rpartition(", ")[0] for line in gpus],
    }


def commit() -> str | None:
    """Returns the commit of this package's checkout, "-dirty" with changes on top; None where there is none."""
    folder = str(Path(ep_a2a.__file__).parent)
    return (
        command_output("git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*").strip()
        or None
    )


def _nccl_version() -> str:
    numbers: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, numbers))


def _triton_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return None
