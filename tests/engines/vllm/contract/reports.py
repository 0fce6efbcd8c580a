"""What became of a check that the program has run in a real vLLM."""

import json
import os
from functools import cache
from pathlib import Path

import pytest

from tests.engines.vllm.contract import wheels
from tests.engines.vllm.contract.program import REPORT
from tests.integration.programs import run

PROGRAM_TIMEOUT_SECS = 900
TIMEOUT = pytest.mark.timeout(wheels.DOWNLOAD_TIMEOUT_SECS + PROGRAM_TIMEOUT_SECS)


@cache
def reports_of(version: str, checks: tuple[str, ...]) -> dict[str, str | None] | wheels.Unavailable:
    """Runs checks with the vLLM of a version.

    Returns:
        By the name of each check that the program has reported: None, or its traceback. "" has what the program wrote.
        Unavailable where the wheel or its dependencies cannot be had.
    """
    try:
        python, wheel = wheels.python_with_dependencies(), wheels.wheel_folder(version)
    except wheels.Unavailable as problem:
        return problem
    return run_checks(python, wheel, checks)


def run_checks(
    python: Path, folder: Path, checks: tuple[str, ...], program: str = "tests.engines.vllm.contract.program"
) -> dict[str, str | None]:
    """The same for the engine that lies in a folder; program: the module that runs its checks."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EP_A2A_", "VLLM_"))}
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(folder), str(wheels.ROOT)]),
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = run(python, "-m", program, *checks, env=variables, secs=PROGRAM_TIMEOUT_SECS)
    lines = [json.loads(line.removeprefix(REPORT)) for line in done.stdout.splitlines() if line.startswith(REPORT)]
    written = f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return {"": written} | {line["name"]: line["error"] for line in lines}


def require_passed(version: str, checks: tuple[str, ...], check: str) -> None:
    """Fails with the traceback of `check`, which is one of `checks`; the first call runs them all in one process."""
    reports = reports_of(version, checks)
    if isinstance(reports, wheels.Unavailable):
        pytest.skip(str(reports))
    assert check in reports, reports[""]
    assert reports[check] is None, reports[check]
