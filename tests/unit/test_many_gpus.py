"""The plan for machines with several GPUs: the options of benches exist, and what fails or lasts is said."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import many_gpus

NAMES = {"ranks": "4", "rows": "ROWS", "folder": "FOLDER"}
COMMANDS = {command.name: command for part in many_gpus.PARTS.values() for command in part}


def help_of(words: list[str]) -> str:
    """What a program says of its options."""
    ends = 4 if words[2] == "ep_a2a" else 3
    done = subprocess.run([*words[:ends], "--help"], capture_output=True, text=True, check=True, cwd=many_gpus.PROJECT)
    return done.stdout


@pytest.mark.parametrize("name", ["peers", "layer", "vllm_bench"])
def test_its_options_exist(name: str) -> None:
    words = many_gpus.words_of(COMMANDS[name], NAMES)
    said = help_of(words)
    same_program = [many_gpus.words_of(each, NAMES) for each in COMMANDS.values()]
    options = {word for each in same_program if each[:4] == words[:4] for word in each if word.startswith("--")}
    assert options
    assert not [option for option in options if option not in said]


def test_its_tests_are_found() -> None:
    for name in ("tests", "special", "faults"):
        words = many_gpus.words_of(COMMANDS[name], NAMES)
        assert (many_gpus.PROJECT / next(word for word in words if word.startswith("tests/"))).exists()


def test_what_fails_or_lasts_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert many_gpus.run(many_gpus.Command("good", 60, "-c 'print({ranks})'"), tmp_path, 4)
    assert not many_gpus.run(many_gpus.Command("bad", 60, "-c 'raise SystemExit(3)'"), tmp_path, 4)
    # a test that is run in the background ignores Ctrl-C, and its children would
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); signal.pause()"
    assert not many_gpus.run(many_gpus.Command("long", 1, f"-c '{heeds}'"), tmp_path, 4)
    assert (tmp_path / "good.txt").read_text() == "4\n"
    said = [line.rpartition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["good: 0", "bad: 3", "long: cut off"]


def test_a_dry_run_prints_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["many_gpus.py", "bench", "--ranks", "8", "--dry-run"])
    assert many_gpus.main() == 0
    assert capsys.readouterr().out.count("--ranks 8") == len(many_gpus.PARTS["bench"])
