"""Checks of Python, of this package and of what it imports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.diagnostic import Finding, error, note, ok, warning

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.system_info import Machine

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""NEWEST: what has been run. Newer ones are taken, with a note."""
NEEDED = ("numpy", "typer", "rich")
REINSTALL_TORCH = "Install torch anew in this environment: pip install --force-reinstall torch"


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def check_python(machine: Machine) -> list[Finding]:
    """The interpreter's version."""
    found = ".".join(map(str, machine.host.python))
    if machine.host.python[:2] < OLDEST_PYTHON:
        return [error("python", found, "Use Python 3.11 or later.")]
    return [ok("python", found)]


def check_system(machine: Machine) -> list[Finding]:
    """The operating system."""
    if machine.host.system != "Linux":
        return [error("system", machine.host.system, "Use Linux: ranks share memory by /dev/shm.")]
    return [ok("system", machine.host.system)]


def check_installation(machine: Machine) -> list[Finding]:
    """Whether the code that runs is the installed one."""
    own = machine.installation
    if own.installed_version is None:
        return [
            note("ep_a2a", f"{own.version}, not installed: imported from a folder",
                 "Engines find it only where it is installed: pip install ep-a2a")
        ]  # fmt: skip
    if own.installed_version != own.version:
        return [
            warning("ep_a2a", f"the code is {own.version}, but {own.installed_version} is installed",
                    "Another copy comes first on the import path, or an editable install is stale: install it anew.")
        ]  # fmt: skip
    return [ok("ep_a2a", own.version)]


def check_torch(machine: Machine) -> list[Finding]:
    """Whether torch imports, and its version."""
    torch = machine.torch
    if torch.version is None:
        return [error("torch", "not installed", "pip install torch")]
    if torch.problem:
        return [error("torch", f"import torch fails: {torch.problem}", _remedy_for_import(torch.problem))]
    found = version_numbers(torch.version)[:2]
    build = f"CUDA {torch.cuda_build}" if torch.cuda_build else f"ROCm {torch.hip_build}" if torch.hip_build else "CPU"
    text = f"{torch.version}, built for {build}"
    findings = []
    if found < OLDEST_TORCH:
        findings.append(error("torch", text, "Install torch 2.11 or later."))
    elif found > NEWEST_TORCH:
        findings.append(note("torch", f"{text}, newer than any that this package has been run with"))
    else:
        findings.append(ok("torch", text))
    if not torch.has_gloo:
        findings.append(error("gloo", "not in this torch", f"Ranks meet through gloo. {REINSTALL_TORCH}"))
    return findings


def check_triton(machine: Machine) -> list[Finding]:
    """Whether Triton imports, and its version."""
    triton = machine.triton
    if triton.version is None:
        return [error("triton", "not installed", "pip install triton; the kernels are Triton, on CPU too")]
    if triton.problem:
        return [
            error("triton", f"import triton fails: {triton.problem}",
                  "Install the version that your torch names: pip install --force-reinstall torch triton")
        ]  # fmt: skip
    found = version_numbers(triton.version)[:2]
    if found < OLDEST_TRITON:
        return [error("triton", triton.version, "Install Triton 3.6 or later, and the torch that goes with it.")]
    if found > NEWEST_TRITON:
        return [note("triton", f"{triton.version}, newer than any that this package has been run with")]
    return [ok("triton", triton.version)]


def check_packages(machine: Machine) -> list[Finding]:
    """Whether what else this package imports is there."""
    have = machine.installation.packages
    missing = [name for name in NEEDED if name not in have]
    if missing:
        names = " ".join(missing)
        return [error("packages", f"without {', '.join(missing)}", f"pip install {names}")]
    return [ok("packages", ", ".join(f"{name} {have[name]}" for name in sorted(have)))]


def _remedy_for_import(problem: str) -> str:
    if "undefined symbol" in problem or "version `" in problem:
        return (
            "A library of another version is loaded in place of torch's own: unset LD_LIBRARY_PATH and LD_PRELOAD. "
            f"If that does not help: {REINSTALL_TORCH}"
        )
    if "cannot open shared object" in problem:
        return f"A library that this build needs is missing. {REINSTALL_TORCH}"
    if "had not answered" in problem:
        return "Look at the disk that it lies on, or give it time: --ask-secs."
    return REINSTALL_TORCH
