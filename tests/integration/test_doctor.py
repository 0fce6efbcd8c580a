"""`ep-a2a doctor` as a user runs it, on machines that work and on some that do not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.integration.programs import PROGRAM_TIMEOUT_SECS, ROOT, environment, run_cli, succeeded

if TYPE_CHECKING:
    from pathlib import Path

FACTS = ("python", "torch", "triton", "GPUs", "/dev/shm", "locked memory", "RDMA", "vLLM", "ATOM", "backend", "kernel")
BARE = "import sys; sys.argv = ['ep-a2a', *sys.argv[1:]]; from ep_a2a.cli import main; main()"


def run_bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with the standard library alone: no package of this environment can be imported."""
    return subprocess.run(
        [sys.executable, "-S", "-c", BARE, *arguments], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=PROGRAM_TIMEOUT_SECS, check=False,
    )  # fmt: skip


def errors_of(report: dict[str, Any]) -> list[str]:
    return [diagnostic["subject"] for diagnostic in report["findings"] if diagnostic["level"] == "error"]


def test_a_machine_that_works() -> None:
    done = run_cli("doctor", "--max-tokens", "64", "--hidden", "256")
    printed = succeeded(done)
    for fact in FACTS:
        assert fact in printed
    assert "bytes needed on this host" in printed
    assert "Nothing found that prevents use." in printed
    assert done.stderr == ""


def test_without_any_package() -> None:
    """Torch, Triton and typer are absent; the command line still starts, and says so."""
    done = run_bare("doctor", "--json", "--selftest")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert errors_of(report) == ["torch", "triton", "packages", "self-test"]
    assert all(diagnostic["remedy"] for diagnostic in report["findings"] if diagnostic["level"] == "error")


def test_as_a_module() -> None:
    command = [sys.executable, "-S", "-m", "ep_a2a.commands.doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_SECS, check=False)
    assert errors_of(json.loads(done.stdout)) == ["torch", "triton", "packages"]


def test_other_commands_point_here_where_packages_are_missing() -> None:
    done = run_bare("demo")
    assert done.returncode == 1
    assert "`ep-a2a doctor` says what is missing" in done.stderr


def test_with_a_broken_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: undefined symbol: ncclX')")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = run_cli("doctor", "--json", "--selftest", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert errors_of(report) == ["torch", "self-test"]
    (torch,) = [diagnostic for diagnostic in report["findings"] if diagnostic["subject"] == "torch"]
    assert "undefined symbol: ncclX" in torch["found"]
    assert "LD_LIBRARY_PATH" in torch["remedy"]


def test_the_self_test_measures_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "rates.png"
    arguments = ("--selftest", "--ranks-per-node", "2", "--pair-secs", "0", "--plot", str(picture))
    done = run_cli("doctor", *arguments)
    printed = succeeded(done)
    assert "1 pairs" in printed
    assert "say nothing about GPUs" in printed.replace("\n", " ").replace("  ", "")
    assert "GB/s from rank" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")
