"""`ep-a2a doctor` as a user runs it, on machines that work and on some that do not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.programs import PROGRAM_TIMEOUT_SECS, ROOT, environment, run_cli, run_python, succeeded

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
    return [finding["subject"] for finding in report["findings"] if finding["level"] == "error"]


@pytest.mark.parametrize("how", ["command", "module"])
def test_a_machine_that_works(how: str) -> None:
    done = run_cli("doctor") if how == "command" else run_python("-m", "ep_a2a.doctor")
    printed = succeeded(done)
    for fact in FACTS:
        assert fact in printed
    assert "Nothing found that prevents use." in printed
    assert done.stderr == ""


def test_all_is_in_the_json() -> None:
    report = json.loads(succeeded(run_cli("doctor", "--json", "--max-tokens", "64", "--hidden", "256")))
    assert report["usable"] is True
    assert report["selftest"] is None
    assert report["choice"]["backend"] == "ep_a2a"
    assert {"torch", "triton", "driver", "host", "rdma", "vllm", "atom"} <= set(report["machine"])
    (memory,) = [finding for finding in report["findings"] if finding["subject"] == "memory"]
    assert memory["level"] == "ok"
    assert "bytes needed" in memory["found"]


def test_without_any_package() -> None:
    """Torch, Triton and typer are absent; the command line still starts, and says so."""
    done = run_bare("doctor", "--json", "--selftest")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert errors_of(report) == ["torch", "triton", "packages", "self-test"]
    assert all(finding["remedy"] for finding in report["findings"] if finding["level"] == "error")


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
    (torch,) = [finding for finding in report["findings"] if finding["subject"] == "torch"]
    assert "undefined symbol: ncclX" in torch["found"]
    assert "LD_LIBRARY_PATH" in torch["remedy"]


def test_what_prevents_a_configuration_is_the_exit_code() -> None:
    done = run_cli("doctor", "--ranks-per-node", "2,1")
    assert done.returncode == 1
    assert "unlike numbers of ranks" in done.stdout
    assert run_cli("doctor", EP_A2A_BACKEND="mroi").returncode == 1


def test_the_self_test_measures_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "rates.png"
    arguments = ("--selftest", "--ranks-per-node", "2", "--pair-secs", "0", "--plot", str(picture))
    done = run_cli("doctor", *arguments)
    printed = succeeded(done)
    assert "1 pairs" in printed
    assert "say nothing about GPUs" in printed.replace("\n", " ").replace("  ", "")
    assert "GB/s from rank" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_said_first(tmp_path: Path) -> None:
    done = run_cli("doctor", "--selftest", "--plot", str(tmp_path / "rates.gif"), "--json")
    assert done.returncode == 1
    assert errors_of(json.loads(done.stdout)) == ["self-test"]
