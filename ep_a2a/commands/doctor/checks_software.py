"""Checks of Python, of this package and of the packages it imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Diagnostic, first
from ep_a2a.commands.doctor.system_info import dotted, version_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.commands.doctor.system_info import SystemInfo

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""NEWEST: the newest that this package has run with. Newer versions get a note."""
INSTALL_WHEEL = 'pip install "$(make -s wheel)" in the checkout of ep_a2a'
"""What installs this package, of which there is no release."""
REINSTALL_TORCH = "Install torch anew in this environment: pip install --force-reinstall torch"
UNTRIED = "newer than any version that this package has run with"


def check_software(info: SystemInfo) -> Iterator[Diagnostic]:
    """Checks versions, and whether torch and Triton can be imported."""
    host, installed, torch, triton = info.host, info.installation, info.torch, info.triton
    yield from first(
        "python",
        (ERROR, host.python[:2] < OLDEST_PYTHON, dotted(host.python), "Use Python 3.11 or later."),
        (OK, True, dotted(host.python)),
    )
    yield from first(
        "system",
        (ERROR, host.system != "Linux", host.system, "Use Linux: ranks share memory by /dev/shm."),
        (OK, True, host.system),
    )
    yield from first(
        "ep_a2a",
        (
            NOTE,
            installed.installed_version is None,
            f"{installed.version}, not installed: imported from a folder",
            f"Engines find it only where it is installed: {INSTALL_WHEEL}",
        ),
        (
            WARNING,
            installed.installed_version != installed.version,
            f"the code is {installed.version}, but {installed.installed_version} is installed",
            "Another copy comes first on the import path, or an editable install is stale: install it anew.",
        ),
        (OK, True, installed.version),
    )
    fails, version = f"import torch fails: {torch.problem}", version_numbers(torch.version or "")[:2]
    yield from first(
        "torch",
        (ERROR, torch.version is None, "not installed", "pip install torch"),
        (
            ERROR,
            "undefined symbol" in torch.problem or "version `" in torch.problem,
            fails,
            "A library of another version is loaded in place of torch's own: unset LD_LIBRARY_PATH and LD_PRELOAD. "
            f"If that does not help: {REINSTALL_TORCH}",
        ),
        (
            ERROR,
            "cannot open shared object" in torch.problem,
            fails,
            f"A library that this build needs is missing. {REINSTALL_TORCH}",
        ),
        (
            ERROR,
            "had not answered" in torch.problem,
            fails,
            "Look at the disk that it lies on, or give it time: --ask-secs.",
        ),
        (ERROR, torch.problem, fails, REINSTALL_TORCH),
        (ERROR, version < OLDEST_TORCH, torch.build, "Install torch 2.11 or later."),
        (NOTE, version > NEWEST_TORCH, f"{torch.build}, {UNTRIED}"),
        (OK, True, torch.build),
    )
    yield from first(
        "gloo",
        (ERROR, torch.works and not torch.has_gloo, "not in this torch", f"Ranks meet through gloo. {REINSTALL_TORCH}"),
    )
    found, version = triton.version or "", version_numbers(triton.version or "")[:2]
    yield from first(
        "triton",
        (ERROR, triton.version is None, "not installed", "pip install triton; the kernels are Triton, on CPU too"),
        (
            ERROR,
            triton.problem,
            f"import triton fails: {triton.problem}",
            "Install the version that your torch names: pip install --force-reinstall torch triton",
        ),
        (ERROR, version < OLDEST_TRITON, found, "Install Triton 3.6 or later, and the torch that goes with it."),
        (NOTE, version > NEWEST_TRITON, f"{found}, {UNTRIED}"),
        (OK, True, found),
    )
    missing = installed.missing_packages
    yield from first(
        "packages",
        (ERROR, missing, f"not installed: {missing}", f"pip install {missing}"),
        (OK, True, installed.packages_text),
    )
