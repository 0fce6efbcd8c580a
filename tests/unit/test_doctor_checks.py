"""What the doctor says of machines on which something is wrong: one case for each failure that users have reported."""

from typing import Any

import pytest

from ep_a2a.commands.doctor.checks import GROUP, Level
from tests.cases.tables import read_table
from tests.machines import CPU_HOST, H200_HOST, choice_of, findings_of, with_facts

LOUD = (Level.WARNING, Level.ERROR)


@pytest.mark.parametrize("machine", [H200_HOST, CPU_HOST], ids=["two H200s", "no GPU"])
def test_nothing_is_wrong_with_a_machine_where_nothing_is_wrong(machine):
    assert [each for each in findings_of(machine) if each.level in LOUD] == []


MACHINES = read_table("doctor_machines")
"""By what happened: a machine where all is well, facts that differ there, what is found, what it says to do."""


def cases(kind: str) -> pytest.MarkDecorator:
    """Parameters of a test: the machine, and what is said of it."""
    hosts = {"two H200s": H200_HOST, "CPU": CPU_HOST}
    rows = [(with_facts(hosts[base], facts), said) for base, facts, *said in MACHINES[kind].values()]
    return pytest.mark.parametrize(("machine", "said"), rows, ids=MACHINES[kind])


@cases("errors")
def test_what_prevents_use_is_an_error_with_a_remedy(machine, said):
    found, remedy = said
    errors = [each for each in findings_of(machine) if each.level is Level.ERROR]
    assert [each for each in errors if found in each.found and remedy in each.remedy and each.remedy], errors


@cases("warnings")
def test_what_may_fail_is_a_warning_with_a_remedy(machine, said):
    found, remedy = said
    (warned,) = [each for each in findings_of(machine) if each.level in LOUD]
    assert warned.level is Level.WARNING
    assert found in warned.found
    assert remedy in warned.remedy


@cases("harmless")
def test_what_is_worth_knowing_is_said_and_harmless(machine, said):
    (found,) = said
    everything = findings_of(machine)
    assert [each for each in everything if each.level in LOUD] == []
    assert len([each for each in everything if found in each.found]) == 1


# --- what a group gets ---

ROCM = {"cuda_build": None, "hip_build": "7.2", "compiler": "", "driver": None, "gpus": [], "num_gpus_of_host": 0}
ROCM_HOST = with_facts(H200_HOST, ROCM)
"""A host of AMD GPUs, which NVIDIA's driver and tools know nothing of."""
BLIND = with_facts(H200_HOST, {"unreachable": {"peer access": ["0 and 1"], "native atomics": ["0 and 1"]}})
A100S = with_facts(H200_HOST, {"gpus.capability": (8, 0)})
PORTABLE = {"backend": "allgather_reducescatter"}
MORI = {"backend": "mori", "ranks_per_node": (2, 2)}


def ranks(*ranks_per_node: int) -> dict[str, Any]:
    return {"ranks_per_node": ranks_per_node}


@pytest.mark.parametrize(
    ("machine", "request_", "backend", "subjects"),
    [
        (BLIND, {}, {}, ["peer access", "native atomics"]),
        (BLIND, PORTABLE, {}, []),
        (CPU_HOST, ranks(2, 2), {}, []),
        (CPU_HOST, ranks(2, 1), {}, ["nodes"]),
        (CPU_HOST, ranks(2, 1) | PORTABLE, {}, []),
        (H200_HOST, ranks(8), {}, []),
        (H200_HOST, ranks(8) | PORTABLE, {}, ["ranks"]),
        (A100S, {}, {}, []),
        (H200_HOST, {}, {"refusal": "expected world_size out of 2, 4", "remedy": "Change it."}, ["ranks"]),
        (H200_HOST, MORI, {"problems": ("no GPU found: needs AMD GPUs", "not installed")}, ["backend", "backend"]),
        (with_facts(H200_HOST, {"torch": None}), MORI, {"problems": ("No module",)}, []),
        (with_facts(H200_HOST, {"triton": None}), MORI, {"problems": ("No module",)}, []),
        (ROCM_HOST, MORI, {}, []),
    ],
)
def test_what_a_request_gets(machine, request_, backend, subjects):
    errors = [each for each in findings_of(machine, request_, GROUP, **backend) if each.level is Level.ERROR]
    assert [each.subject for each in errors] == subjects
    assert all(each.remedy for each in errors)


@pytest.mark.parametrize(
    ("machine", "request_", "level", "subject", "found"),
    [
        (A100S, {}, Level.NOTE, "GPU 1", "no fp8 casts"),
        (H200_HOST, ranks(2, 2), Level.WARNING, "nodes", "virtual nodes only"),
        (ROCM_HOST, MORI, Level.OK, "GPUs", "2 visible to torch"),
    ],
)
def test_what_a_request_does_not_get_is_said(machine, request_, level, subject, found):
    everything = findings_of(machine, request_)
    assert [found in each.found for each in everything if (each.subject, each.level) == (subject, level)] == [True]
    assert not [each for each in everything if each.level is Level.ERROR]


def test_the_default_device_and_ranks():
    found = [(choice.device, choice.ranks_per_node) for choice in map(choice_of, (H200_HOST, CPU_HOST))]
    assert found == [("cuda", (2,)), ("cpu", (4,))]


@pytest.mark.parametrize(
    ("variable", "value", "remedy"), [("BACKEND", "ep_a3a", "ep_a2a"), ("CONFIG", "/nowhere.toml", "EP_A2A_CONFIG")]
)
def test_a_backend_or_config_file_that_is_not_there_is_an_error(monkeypatch, variable, value, remedy):
    monkeypatch.setenv(f"EP_A2A_{variable}", value)
    (finding,) = findings_of(CPU_HOST, section=GROUP)
    assert finding.level is Level.ERROR
    assert value in finding.found
    assert remedy in finding.remedy
