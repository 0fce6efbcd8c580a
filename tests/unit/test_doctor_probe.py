"""How the doctor finds facts: programs that fail, backends, folders, RDMA devices, nvidia-smi's words."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ep_a2a.commands.doctor import ask
from ep_a2a.commands.doctor.ask import request_facts
from ep_a2a.commands.doctor.machine import Atom, Backend, Choice, Driver, Gpu, Request, Vllm
from ep_a2a.commands.doctor.probe import (
    ask_library,
    choose,
    find_atom,
    find_backend,
    find_folder,
    find_rdma_ports,
    find_variable_problems,
    find_vllm,
    read_query,
)
from ep_a2a.commands.plan.command import plan_op
from ep_a2a.commands.programs import command_output
from ep_a2a.managers.registry import available_backends, manager_type
from ep_a2a.path_security import why_unsafe
from tests.cases.atom_cases import SHAPE

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = ROOT / "ep_a2a" / "commands" / "doctor"

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
        ("import signal; signal.pause()", "had not answered within 0.1 s"),
        ("raise SystemExit('no')", "SystemExit: no"),
    ],
)
def test_a_broken_torch_is_described(broken_torch, source, problem):
    broken_torch(source)
    found = ask_library("torch", 0.1 if "pause" in source else 60.0)
    assert "version" not in found
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
    assert found["version"]


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
        ("raise OSError('libmlx5.so')", "OSError: libmlx5.so (build it from github.com"),
        ("Buffer = 1", "needs NVIDIA GPUs"),
    ],
)
def test_a_broken_library_is_described_and_what_its_backend_needs_is_known(library, source, problem):
    library("deep_ep", source)
    found = find_backend(choose(Request("deepep_low_latency", ranks_per_node=(2,)), 0), Request())
    assert problem in found.problems[0]
    assert (found.name, found.kernel, found.refusal) == ("deepep_low_latency", "deep_ep", "")


def test_without_torch_nothing_is_known_of_a_backend(broken_torch):
    broken_torch("raise ImportError('libtorch.so')")
    found = find_backend(Choice("pplx"), Request())
    assert "libtorch.so" in found.problems[0]
    assert found.kernel == "not known"


def test_a_backend_that_is_not_there_is_not_asked():
    assert find_backend(choose(Request("mroi"), 0), Request(), 0.0) == Backend()


def test_our_own_backend_says_what_it_takes(tmp_path, monkeypatch):
    """No file of the current folder runs instead of a library."""
    (tmp_path / "typer.py").write_text("open('it ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    request = Request(hidden_dim=256, max_tokens=16)
    found = find_backend(choose(request, 0), request)
    assert (found.problems, found.refusal) == ((), "")
    assert found.needed_bytes
    assert not (tmp_path / "it ran").exists()


# --- what a manager says of a request ---


def facts_of(name: str, ranks_per_node: tuple[int, ...] = (8,), **sizes: Any) -> dict[str, Any]:
    return request_facts(manager_type(name), list(ranks_per_node), **sizes)


@pytest.mark.parametrize("name", available_backends())
def test_no_backend_refuses_what_is_not_asked(name):
    assert "refusal" not in facts_of(name)
    assert facts_of(name, (8, 8))["kernel"]


def test_kernels_between_nodes():
    assert facts_of("ep_a2a", (2, 2))["kernel"] == "InterNodeV1LL or InterNodeV1"
    assert facts_of("ep_a2a", (2, 2), max_tokens=512)["kernel"] == "InterNodeV1LL"
    assert facts_of("ep_a2a", (2, 2), max_tokens=513)["kernel"] == "InterNodeV1"
    assert facts_of("naive", (2, 1))["kernel"] == "torch.distributed"


def test_bytes_are_those_of_the_plan_where_tokens_are_named():
    sizes = {"hidden": 256, "max_tokens": 64}
    plan, _ = plan_op(ranks=3, experts=96, **sizes)
    assert facts_of("ep_a2a", (3,), **sizes)["needed_bytes"] == plan.bytes_by_rank[0]
    for name, ranks in (("ep_a2a", (3, 3)), ("naive", (3,))):
        assert "needed_bytes" not in facts_of(name, ranks, **sizes)
    assert "needed_bytes" not in facts_of("ep_a2a", (3,), hidden=256)


@pytest.mark.parametrize(
    ("name", "ranks_per_node", "sizes", "refusal"),
    [
        ("ep_a2a", (8,), {"hidden": 7164}, "expected --hidden * 2 bytes (torch.bfloat16) to be a multiple of 16"),
        ("naive", (8,), {"hidden": 2880, "quant": "fp8_per_1x128"}, "a multiple of 128"),
        ("deepep_low_latency", (8,), {"hidden": 4224}, "hidden_dim out of"),
        ("deepep_low_latency", (8,), {"max_tokens": 4096}, "max_num_inp_token_per_rank of at most"),
        ("deepep_low_latency", (8,), {"quant": "fp8_per_token"}, "a cast of dispatch out of"),
        ("deepep_high_throughput", (3,), {}, "world_size out of"),
        ("flashinfer_nvlink_one_sided", (4, 4), {}, "ranks of one node"),
        ("pplx", (1,), {}, "at least 2 ranks"),
    ],
)
def test_sizes_that_a_backend_does_not_take_are_refused(name, ranks_per_node, sizes, refusal):
    found = facts_of(name, ranks_per_node, **sizes)
    assert refusal in found["refusal"]
    assert found["remedy"]
    assert "needed_bytes" not in found


def test_commands_that_fail_say_nothing():
    assert command_output("no-such-program-anywhere") == ""
    assert command_output(sys.executable, "-c", "print(1); raise SystemExit(1)") == ""
    assert command_output(sys.executable, "-c", "print(1)") == "1\n"


def test_the_doctor_runs_without_torch_and_triton():
    """But for the self-test: neither is imported, by whatever module."""
    program = "import sys, ep_a2a.commands.doctor.report\nfor name in sys.argv[1:]: assert name not in sys.modules"
    subprocess.run([sys.executable, "-c", program, "torch", "triton", "numpy"], cwd=ROOT, check=True, timeout=60)


# --- the driver and nvidia-smi ---


class TwoGpus:
    """A driver library with two H200s that reach each other's memory, without atomics."""

    ATTRIBUTES: ClassVar = {ask.CAPABILITY_MAJOR: 9, ask.CAPABILITY_MINOR: 0, ask.NUM_SMS: 132}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            answers = {
                "cuDriverGetVersion": lambda: 13000,
                "cuDeviceGetCount": lambda: 2,
                "cuDeviceGet": lambda: args[1],
                "cuDeviceTotalMem_v2": lambda: 140 << 30,
                "cuDeviceGetAttribute": lambda: self.ATTRIBUTES[args[1]],
                "cuDeviceGetP2PAttribute": lambda: args[1] == ask.P2P_ACCESS,
            }
            if name == "cuDeviceGetName":
                args[0].value = b"NVIDIA H200"
            elif name in answers:
                args[0]._obj.value = answers[name]()
            return 0

        return call


def test_the_driver_is_described(monkeypatch):
    monkeypatch.setattr(ask.ctypes, "CDLL", lambda name: TwoGpus())
    (found,) = ask.driver_facts()
    gpus = found.pop("gpus")
    assert Gpu(**gpus[1]) == Gpu("NVIDIA H200", (9, 0), 132, 140 << 30)
    assert Driver(**found, gpus=gpus).cuda == (13, 0)
    assert found["access"] == ((True, True), (True, True))
    assert found["atomics"] == ((True, False), (False, True))


def test_gpus_are_read_from_a_query():
    assert read_query("580.95.05, 143000\n580.95.05, [N/A]\n") == [("580.95.05", 143000 << 20), ("580.95.05", None)]
    assert read_query("No devices were found\n") == []


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
    tmp_path.chmod(0o777)
    found = find_folder(tmp_path)
    assert (found.path, found.problem) == (str(tmp_path), "")
    assert 0 < found.free_bytes <= found.size_bytes
    assert find_folder(tmp_path / "not" / "yet").problem == "does not exist"
    assert find_folder(tmp_path, holds_code=True).problem.startswith("holds code that is not executed: everybody may")
    tmp_path.chmod(0o700)
    assert find_folder(tmp_path / "not" / "yet", holds_code=True).problem == ""


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
    assert "has no" in found.problem
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1\n")
    assert find_vllm() == Vllm("0.9.1", "it is older than 0.24")


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
