"""Checks of Python, of this package and of the packages it imports."""

from __future__ import annotations

from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Case, Check, always
from ep_a2a.commands.doctor.system_info import version_numbers

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
"""NEWEST: the newest that this package has been run with. Newer versions are accepted, with a note."""
REINSTALL_TORCH = "Install torch anew in this environment: pip install --force-reinstall torch"
TORCH_FAILS = "import torch fails: {it.problem}"

SOFTWARE = (
    Check("python", lambda info: (info.host,),
        Case(ERROR, lambda it: it.python[:2] < OLDEST_PYTHON, "{it.python:dotted}", "Use Python 3.11 or later."),
        Case(OK, always, "{it.python:dotted}")),
    Check("system", lambda info: (info.host,),
        Case(ERROR, lambda it: it.system != "Linux", "{it.system}", "Use Linux: ranks share memory by /dev/shm."),
        Case(OK, always, "{it.system}")),
    Check("ep_a2a", lambda info: (info.installation,),
        Case(NOTE, lambda it: it.installed_version is None, "{it.version}, not installed: imported from a folder",
             "Engines find it only where it is installed: pip install ep-a2a"),
        Case(WARNING, lambda it: it.installed_version != it.version,
             "the code is {it.version}, but {it.installed_version} is installed",
             "Another copy comes first on the import path, or an editable install is stale: install it anew."),
        Case(OK, always, "{it.version}")),
    Check("torch", lambda info: (info.torch,),
        Case(ERROR, lambda it: it.version is None, "not installed", "pip install torch"),
        Case(ERROR, lambda it: "undefined symbol" in it.problem or "version `" in it.problem, TORCH_FAILS,
             "A library of another version is loaded in place of torch's own: unset LD_LIBRARY_PATH and LD_PRELOAD. "
             f"If that does not help: {REINSTALL_TORCH}"),
        Case(ERROR, lambda it: "cannot open shared object" in it.problem, TORCH_FAILS,
             f"A library that this build needs is missing. {REINSTALL_TORCH}"),
        Case(ERROR, lambda it: "had not answered" in it.problem, TORCH_FAILS,
             "Look at the disk that it lies on, or give it time: --ask-secs."),
        Case(ERROR, lambda it: it.problem, TORCH_FAILS, REINSTALL_TORCH),
        Case(ERROR, lambda it: version_numbers(it.version)[:2] < OLDEST_TORCH, "{it.build}",
             "Install torch 2.11 or later."),
        Case(NOTE, lambda it: version_numbers(it.version)[:2] > NEWEST_TORCH,
             "{it.build}, newer than any that this package has been run with"),
        Case(OK, always, "{it.build}")),
    Check("gloo", lambda info: (info.torch,),
        Case(ERROR, lambda it: it.works and not it.has_gloo, "not in this torch",
             f"Ranks meet through gloo. {REINSTALL_TORCH}")),
    Check("triton", lambda info: (info.triton,),
        Case(ERROR, lambda it: it.version is None, "not installed",
             "pip install triton; the kernels are Triton, on CPU too"),
        Case(ERROR, lambda it: it.problem, "import triton fails: {it.problem}",
             "Install the version that your torch names: pip install --force-reinstall torch triton"),
        Case(ERROR, lambda it: version_numbers(it.version)[:2] < OLDEST_TRITON, "{it.version}",
             "Install Triton 3.6 or later, and the torch that goes with it."),
        Case(NOTE, lambda it: version_numbers(it.version)[:2] > NEWEST_TRITON,
             "{it.version}, newer than any that this package has been run with"),
        Case(OK, always, "{it.version}")),
    Check("packages", lambda info: (info.installation,),
        Case(ERROR, lambda it: it.missing_packages, "not installed: {it.missing_packages}",
             "pip install {it.missing_packages}"),
        Case(OK, always, "{it.packages_text}")),
)  # fmt: skip
