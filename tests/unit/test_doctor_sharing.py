"""What the doctor says of ranks that share a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ep_a2a.commands.doctor import ask, probe
from ep_a2a.commands.doctor.finding import Level
from ep_a2a.commands.doctor.machine import Machine, Sharing
from ep_a2a.testing import mps
from tests.machines import CPU_HOST, H200, H200_HOST, changed, findings_of

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.finding import Finding

H200_SHARES = "132 multiprocessors, for 33 ranks at most; 2 ranks get 66 each; 4 ranks get 33 each; 8 ranks get 16 each"
SLICES = Sharing("by time slices, which is slow: there is no nvidia-cuda-mps-control", at_once=False)


def said_of(machine: Machine) -> list[Finding]:
    return [each for each in findings_of(machine) if each.subject == "ranks that share a GPU"]


def test_equal_gpus_are_told_of_once() -> None:
    (said,) = said_of(H200_HOST)
    assert (said.level, said.found) == (Level.OK, f"{H200_SHARES}; ranks run through a private MPS daemon")
    assert said_of(CPU_HOST) == []


@pytest.mark.parametrize(
    ("machine", "found", "remedy"),
    [
        (changed(H200_HOST, sharing=Sharing()), f"{H200_SHARES}; MPS unknown", ""),
        (changed(H200_HOST, sharing=SLICES), "by time slices", "nvidia-cuda-mps-control"),
        (changed(H200_HOST, driver={"gpus": (replace(H200, num_sms=None),)}), "multiprocessors unknown", ""),
        (changed(H200_HOST, driver={"gpus": (replace(H200, num_sms=20),)}), "for 5 ranks at most; 2 ranks get 10", ""),
        (changed(H200_HOST, driver={"gpus": (replace(H200, num_sms=3),)}), "for 0 ranks at most; too few", ""),
    ],
    ids=["no torch", "no MPS", "no libcuda", "20 multiprocessors", "3 multiprocessors"],
)
def test_what_is_not_known_or_not_there_is_said(machine: Machine, found: str, remedy: str) -> None:
    (said,) = said_of(machine)
    assert found in said.found
    assert remedy in said.remedy
    assert said.level in (Level.OK, Level.NOTE)


def test_the_program_that_asks_says_what_a_pool_would_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(ask, "_import_package", lambda folder: None)
    pipe = tmp_path_factory.mktemp("pipe")
    (pipe / "control").touch()
    monkeypatch.setenv(mps.PIPE_VARIABLE, str(pipe))
    (found,) = ask.sharing_facts("")
    assert found == {"way": "through the MPS daemon that runs already", "at_once": True, "problem": ""}


def test_without_torch_it_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_import_package", lambda folder: None)
    monkeypatch.setitem(sys.modules, "ep_a2a.testing.mps", None)
    (found,) = ask.sharing_facts("")
    assert "Error" in found["problem"]
    monkeypatch.setattr(probe, "ask_library", lambda *_: {"version": "?", "problem": "it crashed"})
    assert probe.find_sharing() == Sharing()
