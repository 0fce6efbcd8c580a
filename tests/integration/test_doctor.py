"""`ep-a2a doctor` as a user runs it, on machines that work and on some that do not."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.integration.programs import ROOT, run, run_cli, succeeded

FACTS = ("Python", "torch", "triton", "GPUs", "/dev/shm", "RDMA", "vLLM", "backend", "kernel")
HEAVY = ("torch", "triton", "numpy", "nvidia")
"""Starts of the names of packages that `run_light` does without."""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of this environment, but for HEAVY."""
    folder = tmp_path_factory.mktemp("light")
    for entry in Path(typer.__file__).parents[1].iterdir():
        if not entry.name.startswith(HEAVY) and entry.suffix != ".pth" and "ep_a2a" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    return folder


def run_without_site(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python with this package, the standard library and the folders of `path` alone."""
    return run(sys.executable, "-S", *arguments, env={"PYTHONPATH": f"{ROOT}:{path}"})


def errors_of(report: dict[str, Any]) -> list[str]:
    return [diagnostic["subject"] for diagnostic in report["findings"] if diagnostic["level"] == "error"]


def test_a_machine_that_works() -> None:
    done = run_cli("doctor")
    printed = " ".join(succeeded(done).split())
    for fact in FACTS:
        assert fact in printed
    assert "Nothing found that prevents use." in printed
    assert done.stderr == ""


def test_without_torch_and_triton(light: Path) -> None:
    """Torch, Triton and numpy are absent; the command still starts, and says so."""
    done = run_without_site("-m", "ep_a2a", "doctor", "--json", "--selftest", path=str(light))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert errors_of(report) == ["torch", "triton", "self-test"]
    assert all(diagnostic["remedy"] for diagnostic in report["findings"] if diagnostic["level"] == "error")


@pytest.mark.parametrize("command", ["doctor", "demo"])
def test_without_typer(command: str) -> None:
    done = run_without_site("-m", "ep_a2a", command)
    assert done.returncode == 2
    assert "No module named 'typer'" in done.stderr
    assert "pip install typer rich" in done.stderr


def test_the_self_test_measures() -> None:
    done = run_cli("doctor", "--selftest", "--ranks-per-node", "2")
    printed = " ".join(succeeded(done).split())
    assert re.search(r"ranks 0, 1 \d+ pushes with flags and 3 steps of the op, all right", printed)
    assert "says nothing about GPUs" in printed
    assert "GB/s" not in printed
