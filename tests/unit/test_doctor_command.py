"""The doctor's options, exit code and JSON, on machines that are only described."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ep_a2a.cli.app import make_app
from ep_a2a.commands.doctor import report as doctor_report
from ep_a2a.commands.doctor.machine import Request
from ep_a2a.errors import ConfigError
from tests.machines import CPU_HOST, changed


@pytest.fixture
def doctor(monkeypatch, capsys):
    """`doctor(*arguments, machine=...)`: the exit code and what was printed."""
    for name in ("EP_A2A_BACKEND", "EP_A2A_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, machine: Any = CPU_HOST) -> tuple[int, str]:
        monkeypatch.setattr(doctor_report, "find_machine", lambda ask_secs, backend: machine)
        with pytest.raises(SystemExit) as ended:
            make_app()(["doctor", *arguments])
        return ended.value.code, capsys.readouterr().out

    return run


def test_the_exit_code_says_whether_it_can_be_used(doctor):
    code, printed = doctor()
    assert code == 0
    assert "Nothing found that prevents use." in printed
    code, printed = doctor(machine=changed(CPU_HOST, torch={"version": None}))
    assert code == 1
    assert "pip install torch" in printed
    assert doctor("--ranks-per-node", "2,1")[0] == 1
    assert doctor("--ranks-per-node", "2,1", "--backend", "naive")[0] == 0
    assert doctor("--backend", "mroi")[0] == 1


def test_all_is_in_the_json(doctor):
    code, printed = doctor("--json", "--ranks-per-node", "2,2")
    report = json.loads(printed)
    assert code == 0
    assert report["usable"] is True
    assert report["selftest"] is None
    assert report["choice"]["kernel"] == "InterNodeV1LL or InterNodeV1"
    assert report["choice"]["ranks_per_node"] == [2, 2]
    assert report["machine"]["host"]["shared_memory"]["path"] == "/dev/shm"
    assert {"section", "subject", "level", "found", "remedy"} == set(report["findings"][0])


def test_the_backend_that_is_asked_for_is_probed(doctor, monkeypatch, capsys):
    asked: list[str] = []
    monkeypatch.setattr(doctor_report, "plan_bytes", lambda *sizes: 1 << 20)
    for arguments in ((), ("--backend", "mori_high_throughput", "--max-tokens", "64"), ("--backend", "mroi")):
        monkeypatch.setattr(doctor_report, "find_machine", lambda ask_secs, backend: asked.append(backend) or CPU_HOST)
        with pytest.raises(SystemExit):
            make_app()(["doctor", *arguments])
    assert asked == ["ep_a2a", "mori_high_throughput", ""]
    assert "not known for mori_high_throughput" in capsys.readouterr().out


def test_bytes_are_asked_for_only_where_tokens_are_named(doctor, monkeypatch):
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(doctor_report, "plan_bytes", lambda *sizes: asked.append(sizes) or 1 << 60)
    assert doctor("--hidden", "256")[0] == 0
    assert asked == []
    code, printed = doctor("--hidden", "256", "--max-tokens", "64", "--ranks-per-node", "3")
    assert code == 1
    assert asked == [(Request(ranks_per_node=(3,), hidden_dim=256, max_tokens=64), 3)]
    assert "bytes needed on this host" in printed
    monkeypatch.setattr(doctor_report, "plan_bytes", lambda *sizes: None)
    code, printed = doctor("--max-tokens", "64")
    assert code == 0
    assert "gives no answer" in printed


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_self_test_is_not_tried_without_what_it_needs(doctor, name):
    code, printed = doctor("--selftest", machine=changed(CPU_HOST, **{name: {"version": "?", "problem": "broken"}}))
    assert code == 1
    assert f"not run: it needs {name}" in printed


def test_a_picture_that_cannot_be_drawn_is_said_before_anything_is_started(doctor, tmp_path):
    with pytest.raises(ConfigError, match=r"\*\.png"):
        doctor("--selftest", "--plot", str(tmp_path / "rates.gif"))


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--plot", "rates.png"), "--plot"),
        (("--ask-secs", "-1"), "--ask-secs"),
        (("--max-tokens", "-1"), "--max-tokens"),
        (("--selftest", "--pair-secs", "-1"), "--pair-secs"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(doctor, capsys, arguments, option):
    with pytest.raises(SystemExit) as ended:
        make_app()(["doctor", *arguments])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("counts", ["0", "2,", "two"])
def test_numbers_of_ranks_are_numbers(counts, capsys):
    with pytest.raises(SystemExit) as ended:
        make_app()(["doctor", "--ranks-per-node", counts])
    assert ended.value.code == 2
    assert "--ranks-per-node" in capsys.readouterr().err
