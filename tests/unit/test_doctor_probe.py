"""How the doctor finds facts: programs that fail, folders, RDMA devices, nvidia-smi's words; and its report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ep_a2a.commands.doctor import ask, probe, report
from ep_a2a.commands.doctor.choice import stands_on_library
from ep_a2a.commands.doctor.finding import error, note, ok, warning
from ep_a2a.commands.doctor.machine import Atom, Backend, Request, Sharing
from ep_a2a.commands.doctor.probe import (
    ask_library,
    find_atom,
    find_backend,
    find_folder,
    find_rdma_ports,
    find_variable_problems,
    find_vllm,
    plan_bytes,
    read_links,
    read_query,
)
from ep_a2a.commands.programs import command_output
from ep_a2a.managers.registry import available_backends, manager_type
from ep_a2a.path_security import why_unsafe
from ep_a2a.testing import mps
from tests.cases.atom_cases import SHAPE

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "ep_a2a" / "commands" / "doctor"

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
)


# --- programs that ask libraries ---


@pytest.fixture
def broken_torch(tmp_path, monkeypatch):
    """Makes `import torch` do something else in new processes."""

    def make(source: str) -> None:
        package = tmp_path / "torch"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ImportError('libtorch_cuda.so: undefined symbol: ncclCommWindow')", "ImportError: libtorch_cuda.so"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os, sys; sys.stderr.write('cannot go on\\n'); os._exit(3)", "ended with exit code 3: cannot go on"),
        ("import time; time.sleep(60)", "had not answered within 1 s"),
        ("raise SystemExit('no')", "SystemExit: no"),
    ],
)
def test_a_broken_torch_is_described(broken_torch, source, problem):
    broken_torch(source)
    found = ask_library("torch", 1.0 if "sleep" in source else 60.0)
    assert found["version"] == "?"
    assert problem in found["problem"]


def test_a_folder_in_the_place_of_torch_is_described(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    # without the real one, which comes before a folder that is no package
    done = subprocess.run(
        [sys.executable, "-S", "-P", str(DOCTOR / "ask.py"), "torch"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "stands in its place" in done.stdout


def test_this_torch_is_described():
    found = ask_library("torch", 120.0)
    assert found["problem"] == ""
    assert found["has_gloo"]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Makes a package that new processes can import."""

    def make(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("Buffer = 1", ""),
    ],
)
def test_a_broken_library_is_described_and_what_its_backend_needs_is_known(library, source, problem):
    library("deep_ep", source)
    found = find_backend("deepep_low_latency")
    assert problem in found.problem
    assert bool(found.problem) == bool(problem)
    assert (found.declaration_problem, found.library) == ("", "deep_ep")
    assert "github.com/deepseek-ai/DeepEP" in found.install
    manager = manager_type("deepep_low_latency")
    assert manager is not None
    assert found.capabilities == manager.capabilities
    assert found.kernel == manager.kernel_for(1)[0]


def test_without_torch_nothing_is_known_of_a_backend(broken_torch):
    broken_torch("raise ImportError('libtorch.so')")
    found = find_backend("pplx")
    assert found.capabilities is None
    assert "libtorch.so" in found.declaration_problem


def test_backends_without_a_library_need_no_asking():
    libraries = {name for name in available_backends() if getattr(manager_type(name), "library", None) is not None}
    assert libraries == {name for name in available_backends() if stands_on_library(name)}
    assert find_backend("naive", 0.0) == Backend("naive")
    assert find_backend("") == Backend("")


def test_sharing_is_described_as_a_pool_would_do_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(ask, "_import_package", lambda folder: None)
    pipe = tmp_path_factory.mktemp("pipe")
    (pipe / "control").touch()
    monkeypatch.setenv(mps.PIPE_VARIABLE, str(pipe))
    (found,) = ask.sharing_facts("")
    assert found == {"way": "through the MPS daemon that runs already", "at_once": True, "problem": ""}


def test_sharing_is_unknown_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_import_package", lambda folder: None)
    monkeypatch.setitem(sys.modules, "ep_a2a.testing.mps", None)
    (found,) = ask.sharing_facts("")
    assert "Error" in found["problem"]
    monkeypatch.setattr(probe, "ask_library", lambda *_: {"version": "?", "problem": "it crashed"})
    assert probe.find_sharing() == Sharing()


def test_commands_that_fail_say_nothing():
    assert command_output("no-such-program-anywhere") == ""
    assert command_output(sys.executable, "-c", "print(1); raise SystemExit(1)") == ""
    assert command_output(sys.executable, "-c", "print(1)") == "1\n"


def test_the_doctor_runs_without_torch_and_triton():
    """But for the self-test: neither is imported, by whatever module."""
    program = "import sys, ep_a2a.commands.doctor.report\nfor name in sys.argv[1:]: assert name not in sys.modules"
    subprocess.run([sys.executable, "-c", program, "torch", "triton", "numpy"], cwd=ROOT, check=True, timeout=60)


# --- nvidia-smi ---


def test_links_are_read_from_the_matrix():
    assert read_links(TOPOLOGY) == (("X", "NV18"), ("NV18", "X"))
    assert read_links("") == ()
    assert read_links("Failed to initialize NVML") == ()


def test_gpus_are_read_from_a_query():
    line = "NVIDIA H200, 580.95.05, 143771, 143000, {mig}, Default\n"
    version, gpus = read_query(line.format(mig="Disabled") + line.format(mig="Enabled"))
    assert version == "580.95.05"
    assert [gpu.mig for gpu in gpus] == [False, True]
    assert gpus[0].free_bytes == 143000 << 20
    assert read_query("No devices were found\n") == ("", ())
    assert read_query(line.format(mig="[N/A]").replace("143000", "[N/A]"))[1][0].free_bytes is None


# --- the host ---


def make_port(root: Path, device: str, state: str, layer: str, gids: tuple[str, ...]) -> None:
    port = root / device / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    for name, text in (("state", state), ("link_layer", layer), ("rate", "400 Gb/sec (4X NDR)")):
        (port / name).write_text(f"{text}\n")
    for number, gid in enumerate(gids):
        (port / "gids" / str(number)).write_text(f"{gid}\n")


def test_rdma_ports_are_found(tmp_path):
    none = "0000:0000:0000:0000:0000:0000:0000:0000"
    make_port(tmp_path, "mlx5_1", "1: DOWN", "Ethernet", (none, none))
    make_port(tmp_path, "mlx5_0", "4: ACTIVE", "InfiniBand", (none, "fe80:0000:0000:0000:0000:0000:0000:0001"))
    first, second = find_rdma_ports(tmp_path)
    assert (first.device, first.port, first.state, first.has_address) == ("mlx5_0", "1", "ACTIVE", True)
    assert (second.device, second.state, second.link_layer, second.has_address) == ("mlx5_1", "DOWN", "Ethernet", False)
    assert find_rdma_ports(tmp_path / "none") == ()


def test_folders_are_described(tmp_path):
    tmp_path.chmod(0o700)
    found = find_folder(tmp_path)
    assert (found.exists, found.writable, found.mode, found.owner) == (True, True, 0o700, os.getuid())
    assert found.free_bytes > 0
    later = find_folder(tmp_path / "not" / "yet")
    assert (later.exists, later.writable) == (False, True)


def test_variables_that_cannot_be_read_are_described(monkeypatch):
    monkeypatch.setenv("EP_A2A_TIMEOUT_SECS", "soon")
    monkeypatch.setenv("EP_A2A_COUNTERS", "3")
    problems = find_variable_problems()
    assert list(problems) == ["EP_A2A_TIMEOUT_SECS"]
    assert "'soon'" in problems["EP_A2A_TIMEOUT_SECS"]


def test_a_vllm_that_lacks_what_the_plugin_stands_on_is_described(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    info = tmp_path / "vllm-0.99.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_vllm()
    assert found.version == "0.99.0"
    assert any("has no" in text for text in found.differences)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1\n")
    assert "0.9.1 is not vLLM 0.24 to 0.33" in find_vllm().version_problem


def test_an_atom_is_described_and_not_imported(tmp_path, monkeypatch):
    assert find_atom() == Atom()
    monkeypatch.syspath_prepend(str(SHAPE))
    assert find_atom() == Atom("?", "?")
    info = tmp_path / "amd_aiter-0.1.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_atom() == Atom("?", "0.1.9")
    (tmp_path / "atom").mkdir()
    (tmp_path / "atom" / "__init__.py").write_text("raise RuntimeError('another package of that name')")
    assert find_atom() == Atom(None, "0.1.9")
    assert not {"atom", "aiter"} & set(sys.modules)


# --- whom a folder belongs to ---


def test_folders_of_this_user_are_trusted(tmp_path):
    assert why_unsafe(tmp_path) == ""
    assert why_unsafe(tmp_path / "not" / "yet") == ""


def test_folders_that_everybody_may_write_to_are_not(tmp_path):
    folder = tmp_path / "open" / "cache"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    assert why_unsafe(folder) == f"everybody may write to {folder.parent}"
    folder.parent.chmod(0o1777)
    assert why_unsafe(folder) == ""
    folder.chmod(0o1777)
    assert why_unsafe(folder) == f"everybody may write to {folder}"


def test_links_are_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o777)
    (tmp_path / "link").symlink_to(target)
    assert "everybody may write" in why_unsafe(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give folders to another user")
def test_folders_of_others_are_not_trusted(tmp_path):
    folder = tmp_path / "theirs" / "cache"
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    assert "belongs to user 12345" in why_unsafe(folder)
    os.chown(folder, 0, 0)
    os.chown(folder.parent, 12345, 12345)
    assert "belongs to user 12345" in why_unsafe(folder)


# --- the report ---


def test_the_report_says_what_to_do_and_counts():
    sections = {
        "software": [ok("2.13.0", subject="torch"), error("not installed", "pip install triton", "triton")],
        "nothing": [],
        "memory": [
            warning("60 of 64 MiB free", "--shm-size", "/dev/shm"),
            note("no devices " * 30, subject="RDMA"),
        ],
    }
    text = report.render("0.1.0", sections)
    assert "  ERROR    triton" in text
    assert "> pip install triton" in text
    assert "nothing" not in text
    assert max(map(len, text.splitlines())) <= report.MAX_WIDTH
    for columns in (40, 80):
        assert max(map(len, report.render("0.1.0", sections, columns).splitlines())) <= columns
    assert text.endswith("\nErrors: 1; they prevent use. Warnings: 1.\n")
    assert report.render("0.1.0", {"software": [ok("2", subject="torch")]}).endswith(f"{report.NO_TROUBLE}\n")


def test_plan_runs_no_file_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "typer.py").write_text("open('it ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    assert plan_bytes(Request(max_tokens=16, hidden_dim=64), 2)
    assert not (tmp_path / "it ran").exists()
