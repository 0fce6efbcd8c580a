"""Describes the machine, versions and command of a benchmark, for the header of its reports."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ep_a2a
from ep_a2a.commands.programs import command_output, package_version

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
        "triton": package_version("triton"),
    }
    if device == "cpu":
        return record | {"note": CPU_NOTE, "cpu": platform.processor() or platform.machine()}
    gpus = command_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return record | {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": ", ".join(sorted({line.rpartition(", ")[2] for line in gpus})),
        "gpus": [line.rpartition(", ")[0] for line in gpus],
    }


def commit() -> str | None:
    """Returns the commit of this package's checkout, "-dirty" with changes on top; None where there is none."""
    describe_commit = ("describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    return command_output("git", "-C", str(Path(ep_a2a.__file__).parent), *describe_commit).strip() or None
