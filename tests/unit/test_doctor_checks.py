"""What the doctor says of machines on which something is wrong: one case for each failure that users have reported."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ep_a2a.commands.doctor.checks import GROUP
from ep_a2a.commands.doctor.finding import Level
from ep_a2a.commands.doctor.machine import Atom, Driver, Request
from ep_a2a.commands.doctor.probe import choose
from tests.machines import CPU_HOST, GIB, H200, H200_HOST, changed, findings_of, without_pair

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.machine import Machine

LOUD = (Level.WARNING, Level.ERROR)


@pytest.fixture(autouse=True)
def _no_choices_of_the_environment(monkeypatch):
    for name in ("EP_A2A_BACKEND", "EP_A2A_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("machine", [H200_HOST, CPU_HOST], ids=["two H200s", "no GPU"])
def test_nothing_is_wrong_with_a_machine_where_nothing_is_wrong(machine):
    assert [each for each in findings_of(machine) if each.level in LOUD] == []


def old(capability: tuple[int, int]) -> dict[str, object]:
    return {"gpus": (replace(H200, name="an older GPU", capability=capability),) * 2}


def without_gpus_in_torch(problem: str = "", **changes: object) -> Machine:
    return changed(H200_HOST, torch={"num_gpus": 0, "gpu_problem": problem}, **changes)


def broken_torch(problem: str) -> Machine:
    return changed(H200_HOST, torch={"version": "?", "problem": problem})


def with_variables(base: Machine = H200_HOST, **variables: str) -> Machine:
    return replace(base, environment=variables)


def with_packages(**versions: str) -> Machine:
    named = {name.replace("_", "-"): version for name, version in versions.items()}
    return changed(H200_HOST, installation={"packages": H200_HOST.installation.packages | named})


SHM, CACHE, PORT = H200_HOST.host.shared_memory, H200_HOST.host.triton_cache, H200_HOST.rdma[0]
WITH_ATOM = replace(H200_HOST, atom=Atom(version="0.2", aiter="0.1"))

# (what happened, machine, what is found, what it says to do)
ERRORS: dict[str, tuple[Machine, str, str]] = {
    # torch and Triton
    "not Linux": (changed(CPU_HOST, host={"system": "Darwin"}), "Darwin", "Linux"),
    "torch is absent": (changed(H200_HOST, torch={"version": None}), "not installed", "pip install torch"),
    "torch: undefined symbol": (
        broken_torch("ImportError: libtorch.so: undefined symbol: ncclGin"),
        "undefined symbol: ncclGin",
        "LD_LIBRARY_PATH",
    ),
    "torch: a library is missing": (
        broken_torch("ImportError: libcudart.so.13: cannot open shared object"),
        "libcudart.so.13",
        "force-reinstall torch",
    ),
    "torch crashes": (broken_torch("the process was killed by SIGSEGV: nothing"), "SIGSEGV", "force-reinstall torch"),
    "torch hangs": (broken_torch("it had not answered within 120 s"), "120 s", "--ask-secs"),
    "torch is too old": (changed(H200_HOST, torch={"version": "2.10.0"}), "2.10.0", "2.11"),
    "Triton is absent": (changed(CPU_HOST, triton={"version": None}), "not installed", "pip install triton"),
    "Triton of another build": (
        changed(H200_HOST, triton={"version": "?", "problem": "ImportError: libtriton.so: undefined symbol"}),
        "import triton fails",
        "force-reinstall torch triton",
    ),
    "Triton is too old": (changed(H200_HOST, triton={"version": "3.5.1"}), "3.5.1", "3.6"),
    "numpy is missing": (changed(CPU_HOST, installation={"packages": {}}), "numpy", "pip install numpy"),
    # GPUs and drivers
    "torch without CUDA on a GPU host": (
        changed(H200_HOST, torch={"version": "2.13.0+cpu", "cuda_build": None, "num_gpus": 0}),
        "without CUDA",
        "with CUDA",
    ),
    "the driver is older than torch's CUDA": (
        without_gpus_in_torch("The NVIDIA driver on your system is too old", driver={"cuda": (12, 4)}),
        "built for CUDA 13.0",
        "Update the driver",
    ),
    "a container without its GPUs": (
        without_gpus_in_torch(
            "Found no NVIDIA driver", driver={"problem": "libcuda.so.1: cannot open", "cuda": None, "gpus": ()}
        ),
        "Found no NVIDIA driver",
        "--gpus all",
    ),
    "CUDA_VISIBLE_DEVICES hides all": (
        without_gpus_in_torch(environment={"CUDA_VISIBLE_DEVICES": ""}),
        "sees none",
        "unset it",
    ),
    "NVSwitch without its fabric manager": (
        without_gpus_in_torch("Error 802: system not yet initialized"),
        "802",
        "nvidia-fabricmanager",
    ),
    "GPUs too old for bf16": (
        changed(H200_HOST, driver=old((7, 5))),
        "7.5, 138.0 GiB free of 140.0 GiB",
        "allgather_reducescatter",
    ),
    # links
    "PCIe: no peer access (peers: PCIe unsupported)": (
        changed(H200_HOST, driver={"access": without_pair(), "atomics": without_pair()}),
        "missing between GPUs 0 and 1",
        "allgather_reducescatter",
    ),
    "peer access without native atomics": (
        changed(H200_HOST, driver={"atomics": without_pair()}),
        "missing between GPUs 0 and 1",
        "allgather_reducescatter",
    ),
    "no /dev/shm": (
        changed(CPU_HOST, host={"shared_memory": replace(SHM, problem="does not exist")}),
        "does not exist",
        "--ipc=host",
    ),
    # compilation
    "no C compiler": (changed(H200_HOST, host={"compiler": ""}), "no C compiler", "gcc"),
    "no Python headers": (changed(H200_HOST, host={"python_header": False}), "Python.h", "python3-dev"),
    "Triton's cache cannot be used": (
        changed(H200_HOST, host={"triton_cache": replace(CACHE, problem="cannot be written to")}),
        "cannot be written to",
        "TRITON_CACHE_DIR",
    ),
    # engines
    "vLLM has changed under the plugin (vLLM PR 41382: reduced twice)": (
        changed(H200_HOST, vllm={"version": "0.40.0", "problem": "finalize takes (self)"}),
        "0.40.0: finalize takes",
        "supported vLLM",
    ),
    "vLLM does not find the plugin": (
        changed(H200_HOST, installation={"vllm_entry_point": False}),
        "not among",
        'pip install "$(make -s wheel)"',
    ),
    "VLLM_PLUGINS leaves it out": (
        with_variables(VLLM_PLUGINS="lora_resolver"),
        "does not name ep_a2a",
        "Unset it",
    ),
    "VLLM_PLUGINS has a blank, which vLLM does not strip": (
        with_variables(VLLM_PLUGINS="lora_resolver, ep_a2a"),
        "a blank for a part of a name",
        "without blanks",
    ),
    "ATOM without AITER": (replace(H200_HOST, atom=Atom(version="0.2")), "without AITER", "AITER"),
    # variables
    "an RDMA device that is not there": (with_variables(EP_A2A_RDMA_DEVICES="mlx5_9"), "mlx5_9", "Correct it"),
    "a variable that cannot be read": (
        changed(
            H200_HOST,
            variable_problems={"EP_A2A_TIMEOUT_SECS": "expected a number; got 'x'"},
            environment={"EP_A2A_TIMEOUT_SECS": "x"},
        ),
        "expected a number",
        "docs/env.md",
    ),
}

WARNINGS: dict[str, tuple[Machine, str, str]] = {
    "/dev/shm of a container": (
        changed(CPU_HOST, host={"shared_memory": replace(SHM, size_bytes=64 << 20, free_bytes=60 << 20)}),
        "60 of 64 MiB",
        "--shm-size",
    ),
    "two NVSHMEMs (DeepEP 553: another layout hangs)": (
        with_packages(nvidia_nvshmem_cu12="3.4.5", nvidia_nvshmem_cu13="3.5.1"),
        "both nvidia-nvshmem-cu12 3.4.5",
        "Uninstall",
    ),
    "locked memory is bounded on an RDMA host": (
        changed(H200_HOST, host={"locked_memory_bytes": 64 << 10}),
        "64 KiB",
        "ulimit -l",
    ),
    "a NIC is down (mori 588)": (changed(H200_HOST, rdma=(replace(PORT, state="DOWN"),)), "DOWN", "^mlx5_0"),
    "RoCE without an address": (
        changed(H200_HOST, rdma=(replace(PORT, link_layer="Ethernet", has_address=False),)),
        "no address",
        "interface",
    ),
    "TRITON_INTERPRET": (with_variables(TRITON_INTERPRET="1"), "interpreted", "Unset it"),
    "launches are waited for": (with_variables(CUDA_LAUNCH_BLOCKING="1"), "slow", "Unset it"),
    "streams share a queue (vLLM PR 32860: order of launches differs)": (
        with_variables(CUDA_DEVICE_MAX_CONNECTIONS="1"),
        "may wait for each other",
        "Unset it",
    ),
    "two copies of the package": (
        changed(H200_HOST, installation={"installed_version": "0.0.9"}),
        "0.0.9 is installed",
        "install it anew",
    ),
    "a wait longer than vLLM's own (hangs that name nobody)": (
        with_variables(EP_A2A_TIMEOUT_SECS="900"),
        "cannot say which rank",
        "below 300",
    ),
    "a wait longer than vLLM's own, which a variable says": (
        with_variables(EP_A2A_TIMEOUT_SECS="30", VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="20"),
        "gives a step up after 20 s",
        "below 20",
    ),
    "a misspelt variable": (with_variables(EP_A2A_TIMEOUT_SEC="9"), "does nothing", "EP_A2A_TIMEOUT_SECS"),
    "ATOM as vLLM's plugin, where ours is not installed": (
        changed(with_variables(WITH_ATOM, EP_A2A_BACKEND="ep_a2a"), installation={"atom_entry_point": False}),
        "ep_a2a_atom is not among vLLM's plugins",
        'pip install "$(make -s wheel)"',
    ),
    "ATOM as vLLM's plugin, and VLLM_PLUGINS leaves ours out": (
        with_variables(WITH_ATOM, EP_A2A_BACKEND="ep_a2a", VLLM_PLUGINS="atom,ep_a2a"),
        "does not name ep_a2a_atom",
        "add ep_a2a_atom",
    ),
}

HARMLESS: dict[str, tuple[Machine, str]] = {
    "launch numbers are not tuned (DeepEP 16, 394)": (
        changed(H200_HOST, installation={"tuned_tables": ()}),
        "launches are worked out",
    ),
    "some GPUs are hidden": (changed(H200_HOST, driver={"num_gpus_of_host": 8}), "6 of the host hidden"),
    "the host's name is a loopback address": (changed(H200_HOST, host={"addresses": ("127.0.1.1",)}), "cannot reach"),
    "the host's name has no address": (changed(H200_HOST, host={"addresses": ()}), "has no address"),
    "imported from a folder": (changed(CPU_HOST, installation={"installed_version": None}), "not installed"),
    "ATOM without the switch": (WITH_ATOM, "ATOM 0.2, AITER 0.1; it runs as it is, since EP_A2A_BACKEND is not set"),
    "ATOM with the switch": (
        with_variables(WITH_ATOM, EP_A2A_BACKEND="ep_a2a"),
        "EP_A2A_BACKEND=ep_a2a is for processes that ep_a2a.integrations.atom.serve",
    ),
    "AITER alone": (replace(H200_HOST, atom=Atom(aiter="0.1")), "not in this environment; AITER 0.1"),
    "ranks that share a GPU": (
        changed(H200_HOST, driver={"gpus": (H200, replace(H200, num_sms=20, free_bytes=None))}),
        "140.0 GiB, 20 multiprocessors, enough for 5 ranks",
    ),
}


@pytest.mark.parametrize(("machine", "found", "remedy"), ERRORS.values(), ids=ERRORS)
def test_what_prevents_use_is_an_error_with_a_remedy(machine, found, remedy):
    errors = [each for each in findings_of(machine) if each.level is Level.ERROR]
    assert [each for each in errors if found in each.found and remedy in each.remedy and each.remedy], errors


@pytest.mark.parametrize(("machine", "found", "remedy"), WARNINGS.values(), ids=WARNINGS)
def test_what_may_fail_is_a_warning_with_a_remedy(machine, found, remedy):
    (warned,) = [each for each in findings_of(machine) if each.level in LOUD]
    assert warned.level is Level.WARNING
    assert found in warned.found
    assert remedy in warned.remedy


@pytest.mark.parametrize(("machine", "found"), HARMLESS.values(), ids=HARMLESS)
def test_what_is_worth_knowing_is_said_and_harmless(machine, found):
    everything = findings_of(machine)
    assert [each for each in everything if each.level in LOUD] == []
    assert len([each for each in everything if found in each.found]) == 1


# --- what a group gets ---


def errors_of(machine: Machine, request: Request, **backend: object) -> list[str]:
    return [each.subject for each in findings_of(machine, request, GROUP, **backend) if each.level is Level.ERROR]


def test_the_default_and_why():
    choice = choose(Request(), 2)
    assert (choice.backend, choice.backend_reason) == ("ep_a2a", "the default")
    assert (choice.device, choice.ranks_per_node) == ("cuda", (2,))
    choice = choose(Request(), 0)
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
    machine = changed(H200_HOST, driver={"access": without_pair(), "atomics": without_pair()})
    assert errors_of(machine, Request()) == ["peer access", "native atomics"]
    assert errors_of(machine, Request(backend="allgather_reducescatter")) == []


def test_several_nodes():
    assert errors_of(CPU_HOST, Request(ranks_per_node=(2, 2))) == []
    assert errors_of(CPU_HOST, Request(ranks_per_node=(2, 1))) == ["nodes"]
    assert errors_of(CPU_HOST, Request("allgather_reducescatter", ranks_per_node=(2, 1))) == []
    (warned,) = [each for each in findings_of(H200_HOST, Request(ranks_per_node=(2, 2))) if each.level in LOUD]
    assert "virtual nodes only" in warned.found


def test_memory_of_ranks_that_share_a_gpu_adds_up():
    alone = changed(H200_HOST, torch={"num_gpus": 1})
    request = Request(ranks_per_node=(8,), max_tokens=4096)
    assert "memory" in errors_of(alone, request, needed_bytes=20 * GIB)
    assert errors_of(alone, replace(request, ranks_per_node=(1,)), needed_bytes=20 * GIB) == []
    assert errors_of(H200_HOST, request, needed_bytes=20 * GIB) == []


def test_memory_of_cpu_ranks_is_shared_memory():
    machine = changed(CPU_HOST, host={"shared_memory": replace(SHM, free_bytes=3 * GIB)})
    request = Request(ranks_per_node=(4,), max_tokens=64)
    assert errors_of(machine, request, needed_bytes=GIB) == ["memory"]
    assert errors_of(machine, replace(request, ranks_per_node=(2,)), needed_bytes=GIB) == []


@pytest.mark.parametrize(
    ("machine", "needed_bytes", "found"),
    [
        (H200_HOST, None, "`ep-a2a plan`"),
        (changed(H200_HOST, driver={"gpus": (replace(H200, free_bytes=None),) * 2}), GIB, "needed on each GPU"),
    ],
)
def test_memory_that_is_not_known_is_not_guessed(machine, needed_bytes, found):
    everything = findings_of(machine, Request(max_tokens=4096), needed_bytes=needed_bytes)
    (finding,) = [each for each in everything if each.subject == "memory"]
    assert finding.level is Level.NOTE
    assert found in finding.found


def test_ranks_share_gpus_on_our_own_kernels_only():
    assert errors_of(H200_HOST, Request(ranks_per_node=(8,))) == []
    assert errors_of(H200_HOST, Request("allgather_reducescatter", ranks_per_node=(8,))) == ["ranks"]


def test_fp8_needs_newer_gpus():
    machine = changed(H200_HOST, driver=old((8, 0)))
    assert errors_of(machine, Request()) == []
    assert errors_of(machine, Request(quant="fp8_per_token")) == ["fp8"]


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

ROCM_HOST = changed(
    H200_HOST,
    torch={"cuda_build": None, "hip_build": "7.2"},
    host={"compiler": ""},
    driver=Driver(problem="libcuda.so.1: cannot open shared object file"),
)
"""A host of AMD GPUs, which NVIDIA's driver and tools know nothing of."""


def test_what_a_backend_lacks_is_an_error():
    problems = ("no GPU found: needs AMD GPUs", "amd-mori is not installed")
    request = Request("mori", ranks_per_node=(2, 2))
    errors = [each for each in findings_of(H200_HOST, request, problems=problems) if each.level is Level.ERROR]
    assert [each.found for each in errors] == [f"mori: {problem}" for problem in problems]
    assert all("`ep-a2a backends`" in each.remedy for each in errors)
    for name in ("torch", "triton"):
        absent = changed(H200_HOST, **{name: {"version": None}})
        assert errors_of(absent, request, problems=(f"No module named {name!r}",)) == []


def test_rocm_is_no_error_for_backends_that_are_for_it():
    everything = findings_of(ROCM_HOST, Request("mori", ranks_per_node=(2, 2)))
    assert [each for each in everything if each.level in LOUD] == []
    assert [each for each in everything if each.subject == "GPUs" and "2 visible to torch" in each.found]
    hidden = changed(ROCM_HOST, torch={"num_gpus": 0, "gpu_problem": "no HIP GPUs"})
    assert any("no HIP GPUs" in each.found and "/dev/kfd" in each.remedy for each in findings_of(hidden))
