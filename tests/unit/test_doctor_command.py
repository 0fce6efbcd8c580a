"""The doctor's options, exit code and JSON, on machines that are only described."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ep_a2a.cli.app import app
from ep_a2a.commands.doctor import report as doctor_report
from ep_a2a.commands.doctor.checks import Finding, error, note, ok, warning
from tests.machines import CPU_HOST, with_facts


@pytest.fixture
def doctor(monkeypatch, capsys):
    """`doctor(*arguments, machine=..., backend=...)`: the exit code and what was printed.

    A backend is one of that kernel, whatever is asked of it.
    """

    def run(*arguments: str, machine: Any = CPU_HOST, **backend: Any) -> tuple[int, str]:
        monkeypatch.setattr(doctor_report, "find_machine", lambda: machine)
        monkeypatch.setattr(doctor_report, "ask_backend", lambda choice: replace(choice, **backend))
        with pytest.raises(SystemExit) as ended:
            app(["doctor", *arguments])
        return ended.value.code, capsys.readouterr().out

    return run


def test_the_exit_code_says_whether_it_can_be_used(doctor):
    code, printed = doctor()
    assert code == 0
    assert "Nothing found that prevents use." in printed
    code, printed = doctor(machine=with_facts(CPU_HOST, {"torch": None}))
    assert code == 1
    assert "pip install torch" in printed
    assert doctor("--ranks-per-node", "2,1")[0] == 1
    assert doctor("--ranks-per-node", "2,1", "--backend", "naive")[0] == 0
    assert doctor("--backend", "mroi")[0] == 1


def test_all_is_in_the_json(doctor):
    code, printed = doctor("--json", "--ranks-per-node", "2,2", kernel="InterNodeV1LL")
    report = json.loads(printed)
    assert code == 0
    assert report["usable"] is True
    assert report["selftest"] is None
    assert report["choice"]["kernel"] == "InterNodeV1LL"
    assert report["choice"]["ranks_per_node"] == [2, 2]
    assert report["machine"]["shared_memory_free_bytes"] == CPU_HOST.shared_memory_free_bytes
    assert {"section", "subject", "level", "found", "remedy"} == set(report["findings"][0])


def test_the_report_says_what_to_do_and_counts():
    sections = {
        "software": [ok("torch", "2.13.0"), error("triton", "not installed", "pip install triton")],
        "nothing": [],
        "memory": [warning("/dev/shm", "60 of 64 MiB free", "--shm-size"), note("RDMA", "no devices " * 30)],
    }

    def shown(width: int, **chosen: list[Finding]) -> list[str]:
        console = Console(file=io.StringIO(), width=width)
        doctor_report.show_findings(console, chosen or sections)
        return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]

    lines = shown(80)
    assert "ERROR    triton    not installed" in "\n".join(lines)
    assert "> pip install triton" in "\n".join(lines)
    assert "nothing" not in lines
    for width in (40, 80):
        assert max(map(len, shown(width))) <= width
    assert lines[-1] == "Errors: 1; they prevent use. Warnings: 1."
    assert shown(80, software=sections["software"][:1])[-1] == doctor_report.NO_TROUBLE


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_self_test_is_not_tried_without_what_it_needs(doctor, name):
    broken = with_facts(CPU_HOST, {name: "?", f"{name}_problem": "broken"})
    code, printed = doctor("--selftest", machine=broken)
    assert code == 1
    assert f"not run: it needs {name}" in printed
