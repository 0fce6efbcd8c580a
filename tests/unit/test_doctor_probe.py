"""How the doctor finds facts: programs that fail, backends, GPUs, folders, nvidia-smi's words."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ep_a2a.commands.doctor import probe
from ep_a2a.commands.doctor.ask import request_facts
from ep_a2a.commands.doctor.machine import Choice, Gpu
from ep_a2a.commands.programs import command_output
from ep_a2a.managers.registry import available_backends, manager_type
from ep_a2a.path_security import why_unsafe
from tests.integration.programs import run, succeeded
from tests.machines import CPU_HOST, choice_of

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "ep_a2a" / "commands" / "doctor"

# --- programs that ask libraries ---


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Makes a package that new processes import."""

    def make(name: str, source: str, version: str = "") -> None:
        package = tmp_path / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(source)
        (package / "version.py").write_text(version)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ImportError('libtorch_cuda.so: undefined symbol: ncclCommWindow')", "ImportError: libtorch_cuda.so"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os, sys; sys.stderr.write('cannot go on\\n'); os._exit(3)", "ended with exit code 3: cannot go on"),
        ("import signal; signal.pause()", "had not answered within 0.1 s"),
        ("raise SystemExit('no')", "SystemExit: no"),
    ],
)
def test_a_broken_torch_is_described(library, source, problem):
    library("torch", source)
    found = probe.ask_library("torch", timeout_secs=0.1 if "pause" in source else 60.0)
    assert "torch" not in found
    assert problem in found["torch_problem"]


def test_a_folder_in_the_place_of_torch_is_described(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    # without the real one, which comes before a folder that is no package
    done = run(sys.executable, "-S", "-P", DOCTOR / "ask.py", "torch", env={"PYTHONPATH": str(tmp_path)})
    assert "stands in its place" in succeeded(done)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("raise OSError('libmlx5.so')", "OSError: libmlx5.so (build it from github.com"),
        ("Buffer = 1", "needs NVIDIA GPUs"),
    ],
)
def test_a_broken_library_is_described_and_what_its_backend_needs_is_known(library, source, problem):
    library("deep_ep", source)
    found = probe.ask_backend(choice_of(CPU_HOST, "deepep_low_latency", (2,)))
    assert problem in found.problems[0]
    assert (found.backend, found.kernel, found.refusal) == ("deepep_low_latency", "deep_ep", "")


def test_without_torch_nothing_is_known_of_a_backend(library):
    library("torch", "raise ImportError('libtorch.so')")
    found = probe.ask_backend(Choice("pplx"))
    assert "libtorch.so" in found.problems[0]
    assert found.kernel == "not known"


def test_a_backend_that_is_not_there_is_not_asked():
    choice = choice_of(CPU_HOST, "mroi")
    assert probe.ask_backend(choice) == choice


def test_our_own_backend_is_asked(tmp_path, monkeypatch):
    """No file of the current folder runs instead of a library."""
    (tmp_path / "typer.py").write_text("open('it ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    found = probe.ask_backend(choice_of(CPU_HOST))
    assert (found.problems, found.refusal) == ((), "")
    assert not (tmp_path / "it ran").exists()


# --- what a manager says of a request ---


def facts_of(name: str, ranks_per_node: tuple[int, ...] = (8,)) -> dict[str, Any]:
    return request_facts(manager_type(name), list(ranks_per_node))


@pytest.mark.parametrize("name", available_backends())
def test_no_backend_refuses_what_is_not_asked(name):
    assert "refusal" not in facts_of(name)
    assert facts_of(name, (8, 8))["kernel"]


def test_kernels_between_nodes():
    assert facts_of("ep_a2a", (2, 2))["kernel"] == "InterNodeV1LL or InterNodeV1"
    assert facts_of("naive", (2, 1))["kernel"] == "torch.distributed"


@pytest.mark.parametrize(
    ("name", "ranks_per_node", "refusal"),
    [
        ("deepep_high_throughput", (3,), "world_size out of"),
        ("flashinfer_nvlink_one_sided", (4, 4), "ranks of one node"),
        ("pplx", (1,), "at least 2 ranks"),
    ],
)
def test_ranks_that_a_backend_does_not_take_are_refused(name, ranks_per_node, refusal):
    found = facts_of(name, ranks_per_node)
    assert refusal in found["refusal"]
    assert found["remedy"]


def test_commands_that_fail_say_nothing():
    assert command_output("no-such-program-anywhere") == ""
    assert command_output(sys.executable, "-c", "print(1); raise SystemExit(1)") == ""
    assert command_output(sys.executable, "-c", "print(1)") == "1\n"


def test_the_doctor_runs_without_torch_and_triton():
    """But for the self-test: neither is imported, by whatever module, nor where the name of a backend is looked up."""
    program = "import sys, ep_a2a.commands.doctor.report, ep_a2a.managers.registry\n"
    program += "for name in sys.argv[1:]: assert name not in sys.modules"
    subprocess.run([sys.executable, "-c", program, "torch", "triton", "numpy"], cwd=ROOT, check=True, timeout=60)


# --- GPUs ---


GPUS = """
import ctypes
from types import SimpleNamespace as Names
import torch.version
__version__ = "2.13.0+cu130"
gpu = Names(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=140 << 30)
cuda = Names(init=lambda: None, device_count=lambda: 2, get_device_properties=lambda number: gpu)
class Driver:
    def cuDeviceGetP2PAttribute(self, answer, attribute, a, b):
        answer._obj.value = attribute == 2 or a > b
ctypes.CDLL = lambda name: Driver()
"""
"""A torch that sees two H200s, which reach each other's memory, and one way only with atomics."""
TOO_OLD = 'raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\\nUpdate")'


def test_gpus_are_described(library):
    library("torch", GPUS, version="cuda, hip = '13.0', None")
    found = probe.ask_library("torch")
    assert (found["torch"], found["torch_problem"], found["num_gpus"]) == ("2.13.0+cu130", "", 2)
    assert Gpu(*found["gpus"][1]) == Gpu("NVIDIA H200", (9, 0), 132, 140 << 30)
    assert found["unreachable"] == {"peer access": (), "native atomics": ("0 and 1",)}
    library("torch", f"{GPUS}\ndef init(): {TOO_OLD}\ncuda.init = init", version="cuda, hip = '13.0', None")
    found = probe.ask_library("torch")
    assert found["gpu_problem"] == "The NVIDIA driver on your system is too old (found version 12040)."


def test_gpus_are_read_from_a_query():
    assert probe.read_query("580.95.05, 143000\n580.95.05, [N/A]\n") == [
        ("580.95.05", 143000 << 20),
        ("580.95.05", None),
    ]
    assert probe.read_query("No devices were found\n") == []


# --- the host ---


def test_folders_are_described(tmp_path):
    tmp_path.chmod(0o777)
    assert probe.folder_problem(tmp_path) == ""
    assert probe.folder_problem(tmp_path / "not" / "yet") == "does not exist"
    assert probe.folder_problem(tmp_path, holds_code=True).startswith("holds code that is not executed: everybody may")
    tmp_path.chmod(0o700)
    assert probe.folder_problem(tmp_path / "not" / "yet", holds_code=True) == ""


def test_variables_that_cannot_be_read_are_described(monkeypatch):
    monkeypatch.setenv("EP_A2A_TIMEOUT_SECS", "soon")
    monkeypatch.setenv("EP_A2A_FIRST_TIMEOUT_SECS", "3")
    problems = probe.find_variables()["variable_problems"]
    assert list(problems) == ["EP_A2A_TIMEOUT_SECS"]
    assert "'soon'" in problems["EP_A2A_TIMEOUT_SECS"]


def test_a_vllm_that_lacks_what_the_plugin_stands_on_is_described(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    info = tmp_path / "vllm-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probe.find_vllm()
    assert found["vllm"] == "0.99.0"
    assert "has no" in found["vllm_problem"]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1\n")
    assert probe.find_vllm() == {"vllm": "0.9.1", "vllm_problem": "it is older than 0.26"}


# --- whom a folder belongs to ---


def test_folders_that_others_may_write_to_are_not_trusted(tmp_path):
    folder = tmp_path / "open" / "cache"
    folder.mkdir(parents=True)
    assert why_unsafe(folder) == why_unsafe(tmp_path / "not" / "yet") == ""
    folder.parent.chmod(0o777)
    assert why_unsafe(folder) == f"everybody may write to {folder.parent}"
    (tmp_path / "link").symlink_to(folder.parent)
    assert "everybody may write" in why_unsafe(tmp_path / "link")
    folder.parent.chmod(0o1777)
    assert why_unsafe(folder) == ""
    folder.chmod(0o1777)
    assert why_unsafe(folder) == f"everybody may write to {folder}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give folders to another user")
@pytest.mark.parametrize("place", ["theirs", "theirs/cache"])
def test_folders_of_others_are_not_trusted(tmp_path, place):
    (tmp_path / "theirs" / "cache").mkdir(parents=True)
    os.chown(tmp_path / place, 12345, 12345)
    assert "belongs to user 12345" in why_unsafe(tmp_path / "theirs" / "cache")
