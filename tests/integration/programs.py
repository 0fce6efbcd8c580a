"""Runs this project's programs as a user does: in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM_TIMEOUT_SECS = 240
WITH_A_DEATH = "go_on_example"
"""The example that kills a rank of its own; CPU only."""
TRAINING = "train_moe"
EXAMPLES = ("mori_complete_example", "ep_group_example", "direct_api_example", "deep_ep_example")


def environment() -> dict[str, str]:
    """This process's environment with this checkout importable, without choices that would change the outcome."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EP_A2A_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path, "COLUMNS": "120"}


def run(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT, secs: float = PROGRAM_TIMEOUT_SECS
) -> subprocess.CompletedProcess[str]:
    """A command, by default in the project's folder and with this process's environment as it is."""
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=secs, check=False)


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python *arguments` in the project's folder, with environment variables added."""
    return run(sys.executable, *arguments, env=environment() | variables)


def run_cli(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`ep-a2a *arguments`."""
    return run_python("-m", "ep_a2a", *arguments, **variables)


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python examples/<name>.py *arguments`."""
    return run_python(f"examples/{name}.py", *arguments)


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    """What a program printed, after checking that it ended well."""
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
