"""What the doctor says of machines on which something is wrong: one case for each failure that users have reported."""

from typing import Any

import pytest

from ep_a2a.commands.doctor.checks import GROUP, Level
from ep_a2a.commands.doctor.machine import Machine
from tests.cases.tables import read_table
from tests.machines import CPU_HOST, GIB, H200_HOST, choice_of, findings_of, with_facts

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


def errors_of(machine: Machine, request: dict[str, Any], **backend: object) -> list[str]:
    return [each.subject for each in findings_of(machine, request, GROUP, **backend) if each.level is Level.ERROR]


def test_the_default_and_why():
    choice = choice_of(H200_HOST)
    assert (choice.backend, choice.backend_reason) == ("ep_a2a", "the default")
    assert (choice.device, choice.ranks_per_node) == ("cuda", (2,))
    choice = choice_of(CPU_HOST)
    assert (choice.device, choice.ranks_per_node) == ("cpu", (4,))


@pytest.mark.parametrize(
    ("variable", "value", "remedy"), [("BACKEND", "ep_a3a", "ep_a2a"), ("CONFIG", "/nowhere.toml", "EP_A2A_CONFIG")]
)
def test_a_backend_or_config_file_that_is_not_there_is_an_error(monkeypatch, variable, value, remedy):
    monkeypatch.setenv(f"EP_A2A_{variable}", value)
    (finding,) = findings_of(CPU_HOST, section=GROUP)
    assert finding.level is Level.ERROR
    assert value in finding.found
    assert remedy in finding.remedy


def test_the_portable_backend_needs_no_peer_access():
    machine = with_facts(H200_HOST, {"unreachable": {"peer access": ["0 and 1"], "native atomics": ["0 and 1"]}})
    assert errors_of(machine, {}) == ["peer access", "native atomics"]
    assert errors_of(machine, {"backend": "allgather_reducescatter"}) == []


def test_several_nodes():
    assert errors_of(CPU_HOST, {"ranks_per_node": (2, 2)}) == []
    assert errors_of(CPU_HOST, {"ranks_per_node": (2, 1)}) == ["nodes"]
    assert errors_of(CPU_HOST, {"backend": "allgather_reducescatter", "ranks_per_node": (2, 1)}) == []
    (warned,) = [each for each in findings_of(H200_HOST, {"ranks_per_node": (2, 2)}) if each.level in LOUD]
    assert "virtual nodes only" in warned.found


def test_memory_of_ranks_that_share_a_gpu_adds_up():
    alone = with_facts(H200_HOST, {"num_gpus": 1})
    request = {"ranks_per_node": (8,), "max_tokens": 4096}
    assert "memory" in errors_of(alone, request, needed_bytes=20 * GIB)
    assert errors_of(alone, request | {"ranks_per_node": (1,)}, needed_bytes=20 * GIB) == []
    assert errors_of(H200_HOST, request, needed_bytes=20 * GIB) == []


def test_memory_of_cpu_ranks_is_shared_memory():
    machine = with_facts(CPU_HOST, {"shared_memory_free_bytes": 3 * GIB})
    request = {"ranks_per_node": (4,), "max_tokens": 64}
    assert errors_of(machine, request, needed_bytes=GIB) == ["memory"]
    assert errors_of(machine, request | {"ranks_per_node": (2,)}, needed_bytes=GIB) == []


@pytest.mark.parametrize(
    ("machine", "needed_bytes", "found"),
    [
        (H200_HOST, None, "`ep-a2a plan`"),
        (with_facts(H200_HOST, {"gpus.free_bytes": None}), GIB, "needed on each GPU"),
    ],
)
def test_memory_that_is_not_known_is_not_guessed(machine, needed_bytes, found):
    everything = findings_of(machine, {"max_tokens": 4096}, needed_bytes=needed_bytes)
    (finding,) = [each for each in everything if each.subject == "memory"]
    assert finding.level is Level.NOTE
    assert found in finding.found


def test_ranks_share_gpus_on_our_own_kernels_only():
    assert errors_of(H200_HOST, {"ranks_per_node": (8,)}) == []
    assert errors_of(H200_HOST, {"backend": "allgather_reducescatter", "ranks_per_node": (8,)}) == ["ranks"]


def test_fp8_needs_newer_gpus():
    machine = with_facts(H200_HOST, {"gpus.capability": (8, 0)})
    assert errors_of(machine, {}) == []
    assert errors_of(machine, {"quant": "fp8_per_token"}) == ["fp8"]


def test_sizes_that_the_backend_refuses_are_an_error_with_its_remedy():
    (finding,) = [
        each
        for each in findings_of(
            H200_HOST, section=GROUP, refusal="expected hidden_dim out of 7168", remedy="Change it."
        )
        if each.level is Level.ERROR
    ]
    assert (finding.subject, finding.found, finding.remedy) == (
        "sizes",
        "expected hidden_dim out of 7168",
        "Change it.",
    )


# --- backends on other projects' libraries ---

ROCM = {"cuda_build": None, "hip_build": "7.2", "compiler": "", "driver": None, "gpus": [], "num_gpus_of_host": 0}
ROCM_HOST = with_facts(H200_HOST, ROCM)
"""A host of AMD GPUs, which NVIDIA's driver and tools know nothing of."""


def test_what_a_backend_lacks_is_an_error():
    problems = ("no GPU found: needs AMD GPUs", "amd-mori is not installed")
    request = {"backend": "mori", "ranks_per_node": (2, 2)}
    errors = [each for each in findings_of(H200_HOST, request, problems=problems) if each.level is Level.ERROR]
    assert [each.found for each in errors] == [f"mori: {problem}" for problem in problems]
    assert all("`ep-a2a backends`" in each.remedy for each in errors)
    for name in ("torch", "triton"):
        absent = with_facts(H200_HOST, {name: None})
        assert errors_of(absent, request, problems=(f"No module named {name!r}",)) == []


def test_rocm_is_no_error_for_backends_that_are_for_it():
    everything = findings_of(ROCM_HOST, {"backend": "mori", "ranks_per_node": (2, 2)})
    assert [each for each in everything if each.level in LOUD] == []
    assert [each for each in everything if each.subject == "GPUs" and "2 visible to torch" in each.found]
    hidden = with_facts(ROCM_HOST, {"num_gpus": 0, "gpu_problem": "No HIP GPUs are available"})
    assert any("No HIP GPUs" in each.found and "/dev/kfd" in each.remedy for each in findings_of(hidden))
