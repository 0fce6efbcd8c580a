"""Odd inputs of every command end in one of the documented exit codes and in words, never in a traceback."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ep_a2a.cli import app
from tests.cases import odd_inputs

ON_CPU = ("--device cuda",)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """`run(*arguments)`: the exit code and all that was printed; whatever the command raises is raised."""
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "file").write_text("{")
    (tmp_path / "folder").mkdir()
    (tmp_path / "model").write_text('{"n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168}')
    places = {f"{{{name}}}": str(tmp_path / name) for name in ("file", "folder", "model")}

    def call(*arguments: str) -> tuple[int, str]:
        for name, place in places.items():
            arguments = tuple(argument.replace(name, place) for argument in arguments)
        with pytest.raises(SystemExit) as ended:
            app.run(arguments)
        printed = capsys.readouterr()
        text = printed.out + " ".join(printed.err.replace("│", " ").split())
        assert isinstance(ended.value.code, int)
        return ended.value.code, text

    return call


@pytest.mark.parametrize(
    ("arguments", "code", "said"), odd_inputs.CASES, ids=[" ".join(case[0])[:60] for case in odd_inputs.CASES]
)
def test_an_odd_input_ends_in_words(run, tmp_path, arguments, code, said):
    if said in ON_CPU and torch.cuda.is_available():
        pytest.skip("there are GPUs")
    ended, printed = run(*arguments)
    assert ended == code, printed
    assert said in printed
    assert "Traceback" not in printed
    if code == 2:
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "model"], "left behind"


@pytest.mark.parametrize(("name", "value"), odd_inputs.VARIABLES)
def test_a_variable_that_cannot_be_used_ends_a_command_but_not_its_help(run, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    code, printed = run("plan")
    assert code == 2
    assert name in printed
    assert "remedy" in printed
    assert run("plan", "--help")[0] == 0


@pytest.mark.parametrize("package", ["torch", "triton"])
@pytest.mark.parametrize("command", [name for name in odd_inputs.COMMANDS if name != "doctor"])
def test_a_missing_package_ends_a_command_in_words(run, monkeypatch, command, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    code, printed = run(command)
    assert code == 2
    assert f"the package {package}" in printed
    assert f"pip install {package}" in printed
    assert run(command, "-h")[0] == 0
