"""What all commands do alike, in processes of their own: Ctrl-C, narrow terminals, completion."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from ep_a2a.cli import app
from tests.integration.programs import PROGRAM_TIMEOUT_SECS, ROOT, environment, run_cli, succeeded
from tests.waiting import happens

START_SECS = 120.0
MODULE = ("-m", "ep_a2a")
# as the script ep-a2a, with Ctrl-C where a module is imported
INTERRUPTED = """
import os, signal, sys
module = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path, target=None):
        if name == module:
            sys.meta_path.remove(self)
            # text that is executed, as namedtuple and dataclass do
            exec("os.kill(os.getpid(), signal.SIGINT)")
sys.meta_path.insert(0, Finder())
from ep_a2a.cli import main
main()
"""


def _heed_interrupts() -> None:
    """Programs that a shell starts in the background ignore SIGINT, and so would their children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(
    *arguments: str, program: tuple[str, ...] = MODULE, stdout: int | IO[bytes] = subprocess.PIPE
) -> subprocess.Popen[str]:
    """`ep-a2a *arguments` as the only program of a terminal's session."""
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


DEMO = ("demo", "--device", "cpu", "--tokens", "20000")


@pytest.mark.parametrize(
    ("num_children", "arguments"),
    [
        (1, DEMO),
        (2, DEMO),
        (5, DEMO),
        (5, ("bench", "--device", "cpu", "--ranks", "4", "--tokens", "4000")),
        (5, ("trace", "--device", "cpu", "--ranks", "4", "--steps", "1000")),
        (5, ("doctor", "--selftest", "--ranks-per-node", "4")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_ctrl_c_is_said_in_one_word(num_children: int, arguments: tuple[str, ...], tmp_path: Path) -> None:
    """SIGINT reaches all processes of the session: the command, the server of forks, the ranks."""
    output = ("--output", str(tmp_path / "out")) if arguments[0] == "trace" else ()
    process = start(*arguments, *output)
    happens(lambda: len(descendants(process.pid)) >= num_children or process.poll() is not None, START_SECS)
    os.killpg(process.pid, signal.SIGINT)
    printed, said = process.communicate(timeout=PROGRAM_TIMEOUT_SECS)
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in printed + said


@pytest.mark.parametrize(
    "module", ["typer", "rich.console", "ep_a2a.commands.plan.command", "torch", "torch.distributed", "numpy"]
)
def test_ctrl_c_is_not_lost_in_an_import(module: str) -> None:
    process = start(module, "plan", program=("-c", INTERRUPTED))
    printed, said = process.communicate(timeout=PROGRAM_TIMEOUT_SECS)
    assert (process.returncode, said, printed) == (130, "interrupted\n", "")


@pytest.mark.parametrize("arguments", [("plan", "--json"), ("backends", "naive")])
def test_a_full_disk_is_said_in_words(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("wb") as full:
        process = start(*arguments, stdout=full)
        _, said = process.communicate(timeout=PROGRAM_TIMEOUT_SECS)
    assert process.returncode == 2
    assert "No space left on device" in said
    assert "Traceback" not in said


def test_without_standard_output() -> None:
    command = f"exec {sys.executable} -m ep_a2a plan >&-"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 2
    assert "standard output" in done.stderr


@pytest.mark.parametrize("columns", ["20", "80"])
@pytest.mark.parametrize("command", ["demo", "bench", "trace", "plan", "backends", "doctor"])
def test_help_cuts_no_option(
    command: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit, match="0"):
        app.run((command, "--help"))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "  -q, --quiet" in printed


def test_backends_fit_one_screen() -> None:
    done = run_cli("backends", COLUMNS="80")
    lines = succeeded(done).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "flashinfer_nvlink_two_sided" in done.stdout


def test_colours_follow_the_terminal() -> None:
    assert "\x1b" not in succeeded(run_cli("backends"))
    assert "\x1b" not in run_cli("plan", "--hidden", "3", NO_COLOR="1").stderr


def test_completion_is_offered() -> None:
    assert "_EP_A2A_COMPLETE" in succeeded(
        run_cli("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    )


def test_quiet_and_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = run_cli("plan", "--json", "--output", str(path))
    assert json.loads(path.read_text()) == json.loads(succeeded(done))
    assert f"written: {path}" in done.stderr
    assert run_cli("plan", "-q", "--output", str(path)).stderr == ""
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]
