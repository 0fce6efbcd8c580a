"""Real vLLM releases for tests: their Python files, and a Python that has what these import."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.wheels import DOWNLOAD_TIMEOUT_SECS as DOWNLOAD_TIMEOUT_SECS
from tests.wheels import Release
from tests.wheels import Unavailable as Unavailable

ROOT = Path(__file__).resolve().parents[4]
VERSIONS = ("0.24.0", "0.28.0", "0.33.0")
"""Lowest, middle and newest of those that are supported."""
NEWEST = VERSIONS[-1]

PYTHON_WITH_DEPENDENCIES = ROOT / ".venv-vllm" / "bin" / "python"
"""Made by `make test-vllm`."""
DEPENDENCIES = ("transformers", "pydantic", "cbor2", "msgspec", "zmq", "openai", "xgrammar", "fastapi", "psutil")
PROGRAM_TIMEOUT_SECS = 900


def wheel_folder(version: str) -> Path:
    """The folder with `vllm` and its METADATA of a release; see tests.wheels."""
    return Release("vllm", version, abis=("abi3", "cp38")).folder()


def metadata_path(folder: Path, version: str) -> Path:
    return folder / f"vllm-{version}.dist-info" / "METADATA"


def python_with_dependencies() -> Path:
    """A Python that has the packages which vLLM imports.

    Raises:
        Unavailable: there is none.
    """
    missing = [name for name in DEPENDENCIES if importlib.util.find_spec(name) is None]
    if not missing:
        return Path(sys.executable)
    if PYTHON_WITH_DEPENDENCIES.exists():
        return PYTHON_WITH_DEPENDENCIES
    raise Unavailable(f"vLLM's dependencies are not installed ({', '.join(missing)}); `make test-vllm` installs them")


def run_program(version: str, module: str, *arguments: str) -> dict[str, str | None]:
    """Runs `python -m module *arguments` with the vLLM of a version.

    Returns:
        By the name of each check that the program has reported: None, or its traceback. "" has what the program wrote.

    Raises:
        Unavailable: the wheel or its dependencies cannot be had.
    """
    python = python_with_dependencies()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EP_A2A_", "VLLM_"))}
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(wheel_folder(version)), str(ROOT)]),
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [str(python), "-m", module, *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_SECS,
        check=False,
    )
    reported: dict[str, str | None] = {"": f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"}
    for line in done.stdout.splitlines():
        if line.startswith(REPORT):
            report: dict[str, Any] = json.loads(line.removeprefix(REPORT))
            reported[report["name"]] = report["error"]
    return reported


REPORT = "report: "
"""Begins a line that a program writes about a check."""


def report(name: str, error: str | None) -> None:
    """For programs: writes about a check."""
    sys.stdout.write(f"{REPORT}{json.dumps({'name': name, 'error': error})}\n")
    sys.stdout.flush()


def symbol_of(target: str) -> str:
    """A registry entry's target as the table of signatures names it: "file:name"."""
    module, _, name = target.partition(":")
    if module == "vllm.platforms":
        # the patch lies on the platform object, in front of its class
        return f"platforms/interface.py:{name.replace('current_platform', 'Platform')}"
    return f"{module.removeprefix('vllm.').replace('.', '/')}.py:{name}"
