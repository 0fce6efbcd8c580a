"""What the doctor says of machines on which something is wrong: one case for each failure that users have reported."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ep_a2a.commands.doctor.checks import GROUP
from ep_a2a.commands.doctor.choice import choose
from ep_a2a.commands.doctor.finding import Level
from ep_a2a.commands.doctor.machine import Atom, Backend, Driver, Request, Sharing
from ep_a2a.managers.capabilities import Capabilities
from tests.machines import ALL, CPU_HOST, GIB, H200, H200_HOST, changed, findings_of, without_pair

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.finding import Finding
    from ep_a2a.commands.doctor.machine import Machine


@pytest.fixture(autouse=True)
def _no_choices_of_the_environment(monkeypatch):
    for name in ("EP_A2A_BACKEND", "EP_A2A_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("machine", [H200_HOST, CPU_HOST], ids=["two H200s", "no GPU"])
def test_nothing_is_wrong_with_a_machine_where_nothing_is_wrong(machine):
    assert [each for each in findings_of(machine) if each.level in (Level.WARNING, Level.ERROR)] == []


def old(capability: tuple[int, int]) -> dict[str, object]:
    return {"gpus": (replace(H200, name="an older GPU", capability=capability),) * 2}


WITH_ATOM = replace(H200_HOST, atom=Atom(version="0.2", aiter="0.1"))


def with_variable(name: str, value: str, base: Machine = H200_HOST) -> Machine:
    return changed(base, environment={name: value})


def with_backend(base: Machine, name: str, can: Capabilities, **facts: object) -> Machine:
    backend = Backend(
        name,
        library="some-library",
        install="pip install some-library",
        version="1.0",
        kernel="its own",
        kernel_between_nodes="its own between nodes",
        capabilities=can,
    )
    return replace(base, backend=replace(backend, **facts))


SHM = H200_HOST.host.shared_memory
CACHE = H200_HOST.host.triton_cache
PORT = H200_HOST.rdma[0]

# (what happened, machine, what is found, what it says to do)
ERRORS: dict[str, tuple[Machine, str, str]] = {
    # torch and Triton
    "Python is too old": (changed(H200_HOST, host={"python": (3, 10, 4)}), "3.10.4", "3.11"),
    "not Linux": (changed(CPU_HOST, host={"system": "Darwin"}), "Darwin", "Linux"),
    "torch is absent": (changed(H200_HOST, torch={"version": None}), "not installed", "pip install torch"),
    "torch: undefined symbol": (
        changed(H200_HOST, torch={"version": "?", "problem": "ImportError: libtorch.so: undefined symbol: ncclGin"}),
        "undefined symbol: ncclGin",
        "LD_LIBRARY_PATH",
    ),
    "torch: a library is missing": (
        changed(
            H200_HOST, torch={"version": "?", "problem": "ImportError: libcudart.so.13: cannot open shared object"}
        ),
        "libcudart.so.13",
        "force-reinstall torch",
    ),
    "torch crashes": (
        changed(H200_HOST, torch={"version": "?", "problem": "the process was killed by SIGSEGV: nothing"}),
        "SIGSEGV",
        "force-reinstall torch",
    ),
    "torch hangs": (
        changed(H200_HOST, torch={"version": "?", "problem": "it had not answered within 120 s"}),
        "120 s",
        "--ask-secs",
    ),
    "torch is too old": (changed(H200_HOST, torch={"version": "2.10.0"}), "2.10.0", "2.11"),
    "torch without gloo": (changed(H200_HOST, torch={"has_gloo": False}), "not in this torch", "gloo"),
    "Triton is absent": (changed(CPU_HOST, triton={"version": None}), "not installed", "pip install triton"),
    "Triton of another build": (
        changed(H200_HOST, triton={"version": "?", "problem": "ImportError: libtriton.so: undefined symbol"}),
        "import triton fails",
        "force-reinstall torch triton",
    ),
    "Triton is too old": (changed(H200_HOST, triton={"version": "3.5.1"}), "3.5.1", "3.6"),
    "a package is missing": (
        changed(CPU_HOST, installation={"packages": {"numpy": "2"}}),
        "typer",
        "pip install typer rich",
    ),
    # GPUs and drivers
    "torch without CUDA on a GPU host": (
        changed(H200_HOST, torch={"version": "2.13.0+cpu", "cuda_build": None, "num_gpus": 0}),
        "without CUDA",
        "with CUDA",
    ),
    "ROCm (vLLM issue 57029: illegal access at world size 2)": (
        changed(H200_HOST, torch={"cuda_build": None, "hip_build": "7.2"}),
        "ROCm 7.2",
        "NVIDIA GPUs, or the backend mori",
    ),
    "the driver is older than torch's CUDA": (
        changed(
            H200_HOST,
            torch={"num_gpus": 0, "gpu_problem": "The NVIDIA driver on your system is too old"},
            driver={"cuda": (12, 4)},
        ),
        "built for CUDA 13.0",
        "Update the driver",
    ),
    "a container without its GPUs": (
        changed(
            H200_HOST,
            torch={"num_gpus": 0, "gpu_problem": "Found no NVIDIA driver"},
            driver={"problem": "libcuda.so.1: cannot open", "cuda": None, "gpus": (H200,)},
        ),
        "Found no NVIDIA driver",
        "--gpus all",
    ),
    "CUDA_VISIBLE_DEVICES hides all": (
        changed(H200_HOST, torch={"num_gpus": 0}, environment={"CUDA_VISIBLE_DEVICES": ""}),
        "sees none",
        "unset it",
    ),
    "NVSwitch without its fabric manager": (
        changed(H200_HOST, torch={"num_gpus": 0, "gpu_problem": "Error 802: system not yet initialized"}),
        "802",
        "nvidia-fabricmanager",
    ),
    "GPUs too old for bf16": (changed(H200_HOST, driver=old((7, 5))), "7.5 is too old", "allgather_reducescatter"),
    "MIG": (changed(H200_HOST, driver={"gpus": (replace(H200, mig=True),) * 2}), "divided", "nvidia-smi -mig 0"),
    "compute mode Prohibited": (
        changed(H200_HOST, driver={"gpus": (replace(H200, compute_mode="Prohibited"),) * 2}),
        "Prohibited",
        "nvidia-smi -c",
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
    "no symmetric memory": (
        changed(H200_HOST, torch={"has_symmetric_memory": False}),
        "not in this torch",
        "2.11 or later",
    ),
    "an older NCCL is loaded than torch was built with (peers: compile and run NCCL differ)": (
        changed(H200_HOST, torch={"nccl": "2.27.3"}),
        "2.27.3 is loaded",
        "LD_PRELOAD",
    ),
    "no /dev/shm": (
        changed(CPU_HOST, host={"shared_memory": replace(SHM, exists=False)}),
        "does not exist",
        "--ipc=host",
    ),
    "/dev/shm is read-only": (
        changed(CPU_HOST, host={"shared_memory": replace(SHM, writable=False)}),
        "cannot be written",
        "--ipc=host",
    ),
    "/dev/shm where others can replace files": (
        changed(CPU_HOST, host={"shared_memory": replace(SHM, mode=0o777)}),
        "other users",
        "chmod 1777",
    ),
    # compilation
    "no C compiler": (changed(H200_HOST, host={"compiler": ""}), "no C compiler", "gcc"),
    "no Python headers": (changed(H200_HOST, host={"python_header": False}), "Python.h", "python3-dev"),
    "Triton's cache cannot be written": (
        changed(H200_HOST, host={"triton_cache": replace(CACHE, writable=False)}),
        "cannot be written",
        "TRITON_CACHE_DIR",
    ),
    "Triton's cache is another user's": (
        changed(H200_HOST, host={"triton_cache": replace(CACHE, unsafe="it belongs to user 7")}),
        "belongs to user 7",
        "TRITON_CACHE_DIR",
    ),
    "Triton's cache is mounted noexec": (
        changed(H200_HOST, host={"triton_cache": replace(CACHE, no_exec=True)}),
        "noexec",
        "TRITON_CACHE_DIR",
    ),
    # engines
    "vLLM is too old": (
        changed(H200_HOST, vllm={"version": "0.23.0", "version_problem": "0.23.0 is not vLLM 0.24 to 0.33"}),
        "0.23.0",
        "supported vLLM",
    ),
    "vLLM has changed under the plugin (vLLM PR 41382: reduced twice)": (
        changed(H200_HOST, vllm={"version": "0.40.0", "differences": ("finalize takes (self)",)}),
        "finalize takes",
        "ep-a2a",
    ),
    "vLLM does not find the plugin": (
        changed(H200_HOST, installation={"vllm_entry_point": False}),
        "not among them",
        'pip install "$(make -s wheel)"',
    ),
    "VLLM_PLUGINS leaves it out": (with_variable("VLLM_PLUGINS", "lora_resolver"), "does not name ep_a2a", "Unset it"),
    "VLLM_PLUGINS has a blank, which vLLM does not strip": (
        with_variable("VLLM_PLUGINS", "lora_resolver, ep_a2a"),
        "a blank beside ep_a2a",
        "Take it out",
    ),
    "vLLM's bound of a step is no number": (
        changed(H200_HOST, environment={"EP_A2A_TIMEOUT_SECS": "30", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "abc"}),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=abc is no whole number",
        "Correct or unset it",
    ),
    "vLLM's bound of a step is empty": (
        with_variable("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", ""),
        "is no whole number",
        "Correct or unset it",
    ),
    "ATOM without AITER": (
        replace(H200_HOST, atom=Atom(version="0.2")),
        "without AITER",
        "AITER",
    ),
    # variables
    "a backend that is not there": (with_variable("EP_A2A_BACKEND", "mroi"), "'mroi'", ""),
    "a config file that is not there": (
        with_variable("EP_A2A_CONFIG", "/nowhere.toml"),
        "/nowhere.toml",
        "EP_A2A_CONFIG",
    ),
    "a transport that is not there": (
        with_variable("EP_A2A_INTERNODE_TRANSPORT", "rdma"),
        "not in this version",
        "torch.distributed",
    ),
    "NVSHMEM asked for and not installed": (
        with_variable("EP_A2A_INTERNODE_TRANSPORT", "nvshmem"),
        "no package nvidia-nvshmem",
        "pip install",
    ),
    "a folder of tables that is not there": (with_variable("EP_A2A_TUNING_DIR", "/nowhere"), "no folder", "Make it"),
    "a level that is not there": (with_variable("EP_A2A_LOG_LEVEL", "loud"), "no level", "DEBUG"),
    "an RDMA device that is not there": (with_variable("EP_A2A_RDMA_DEVICES", "mlx5_9"), "mlx5_9", "Correct it"),
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
    "memory held by others (uccl 924, sglang 29942: out of memory at first use)": (
        changed(H200_HOST, driver={"gpus": (replace(H200, free_bytes=20 * GIB), H200)}),
        "GPU 0 has 20.0",
        "nvidia-smi",
    ),
    "GPUs that differ": (
        changed(H200_HOST, driver={"gpus": (H200, replace(H200, capability=(10, 0)))}),
        "differ",
        "equal GPUs",
    ),
    "compute mode Exclusive_Process": (
        changed(H200_HOST, driver={"gpus": (replace(H200, compute_mode="Exclusive_Process"),) * 2}),
        "one process",
        "DEFAULT",
    ),
    "two NVSHMEMs (DeepEP 553: another layout hangs)": (
        changed(
            H200_HOST,
            installation={
                "packages": {
                    **H200_HOST.installation.packages,
                    "nvidia-nvshmem-cu12": "3.4.5",
                    "nvidia-nvshmem-cu13": "3.5.1",
                }
            },
        ),
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
    "little room for compiled kernels": (
        changed(H200_HOST, host={"triton_cache": replace(CACHE, free_bytes=1 << 20)}),
        "free at",
        "TRITON_CACHE_DIR",
    ),
    "TRITON_INTERPRET": (with_variable("TRITON_INTERPRET", "1"), "interpreted", "Unset it"),
    "two copies of the package": (
        changed(H200_HOST, installation={"installed_version": "0.0.9"}),
        "0.0.9 is installed",
        "install it anew",
    ),
    "a wait longer than vLLM's own (hangs that name nobody)": (
        with_variable("EP_A2A_TIMEOUT_SECS", "900"),
        "cannot say which rank",
        "below 300",
    ),
    "a misspelt variable": (with_variable("EP_A2A_TIMEOUT_SEC", "9"), "does nothing", "EP_A2A_TIMEOUT_SECS"),
    "NCCL_IB_HCA and EP_A2A_RDMA_DEVICES": (
        changed(H200_HOST, environment={"NCCL_IB_HCA": "mlx5_1", "EP_A2A_RDMA_DEVICES": "mlx5_0"}),
        "does not count",
        "Unset one",
    ),
    "streams share a queue (vLLM PR 32860: order of launches differs)": (
        with_variable("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        "may wait for each other",
        "Unset it",
    ),
    "ATOM as vLLM's plugin, where ours is not installed": (
        changed(with_variable("EP_A2A_BACKEND", "ep_a2a", WITH_ATOM), installation={"atom_entry_point": False}),
        "ep_a2a_atom is not among vLLM's plugins",
        'pip install "$(make -s wheel)"',
    ),
    "ATOM as vLLM's plugin, and VLLM_PLUGINS leaves ours out": (
        changed(WITH_ATOM, environment={"EP_A2A_BACKEND": "ep_a2a", "VLLM_PLUGINS": "atom,ep_a2a"}),
        "does not name ep_a2a_atom",
        "add ep_a2a_atom",
    ),
    "ATOM as vLLM's plugin, and VLLM_PLUGINS names ours with a blank": (
        changed(WITH_ATOM, environment={"EP_A2A_BACKEND": "ep_a2a", "VLLM_PLUGINS": "atom,ep_a2a, ep_a2a_atom"}),
        "a blank beside ep_a2a_atom",
        "Take it out",
    ),
    "vLLM's bound of a step is no number, where vLLM is not": (
        with_variable("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "4.5", CPU_HOST),
        "is no whole number",
        "Correct or unset it",
    ),
    "a wait longer than vLLM's own, which a variable says": (
        changed(H200_HOST, environment={"EP_A2A_TIMEOUT_SECS": "30", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20"}),
        "gives a step up after 20 s",
        "below 20",
    ),
    "launches are waited for": (with_variable("CUDA_LAUNCH_BLOCKING", "1"), "slow", "Unset it"),
}

HARMLESS: dict[str, tuple[Machine, str]] = {
    "torch is newer than any that was run": (changed(H200_HOST, torch={"version": "2.20.0"}), "newer than any"),
    "Triton is newer than any that was run": (changed(H200_HOST, triton={"version": "4.0.0"}), "newer than any"),
    "GPUs without fp8": (changed(H200_HOST, driver=old((8, 0))), "no fp8 casts"),
    "GPUs that nothing has run on (vLLM issue 41687: SM103)": (changed(H200_HOST, driver=old((10, 3))), "have not run"),
    "launch numbers are not tuned (DeepEP 16, 394)": (
        changed(H200_HOST, installation={"tuned_tables": ()}),
        "launches are worked out",
    ),
    "some GPUs are hidden": (changed(H200_HOST, driver={"num_gpus_of_host": 8}), "6 of the host hidden"),
    "Ray: every rank's GPU is cuda:0": (
        changed(H200_HOST, installation={"packages": CPU_HOST.installation.packages}),
        "Ray",
    ),
    "a newer NCCL is loaded": (changed(H200_HOST, torch={"nccl": "2.30.4"}), "built with 2.28.9"),
    "RDMA without GPUDirect": (changed(H200_HOST, host={"gpu_direct": ""}), "nvidia_peermem"),
    "the host's name is a loopback address": (changed(H200_HOST, host={"addresses": ("127.0.1.1",)}), "cannot reach"),
    "imported from a folder": (changed(CPU_HOST, installation={"installed_version": None}), "not installed"),
    "ATOM without the switch": (WITH_ATOM, "ATOM 0.2, AITER 0.1; it runs as it is, since EP_A2A_BACKEND is not set"),
    "ATOM with the switch": (
        with_variable("EP_A2A_BACKEND", "ep_a2a", WITH_ATOM),
        "EP_A2A_BACKEND=ep_a2a is for processes that ep_a2a.integrations.atom.serve",
    ),
    "AITER alone": (replace(H200_HOST, atom=Atom(aiter="0.1")), "not in this environment; AITER 0.1"),
    "ranks that share GPUs: said once for equal ones": (
        H200_HOST,
        "132 multiprocessors, for 33 ranks at most; 2 ranks get 66 each; 4 ranks get 33 each; 8 ranks get 16 each; "
        "ranks run through a private MPS daemon",
    ),
    "ranks that share GPUs, without torch": (replace(H200_HOST, sharing=Sharing()), "; MPS unknown"),
    "ranks that share GPUs, without MPS": (
        replace(H200_HOST, sharing=Sharing("by time slices, which is slow", at_once=False)),
        "by time slices, which is slow > Install the driver's nvidia-cuda-mps-control",
    ),
    "ranks that share GPUs, without libcuda": (
        changed(H200_HOST, driver={"gpus": (replace(H200, num_sms=None),)}),
        "multiprocessors unknown",
    ),
    "ranks that share a GPU of 20 multiprocessors": (
        changed(H200_HOST, driver={"gpus": (replace(H200, num_sms=20),)}),
        "for 5 ranks at most; 2 ranks get 10 each; 4 ranks get 5 each",
    ),
    "ranks that share a GPU of 3 multiprocessors": (
        changed(H200_HOST, driver={"gpus": (replace(H200, num_sms=3),)}),
        "for 0 ranks at most; too few",
    ),
    "the links cannot be asked for": (changed(H200_HOST, driver={"access": (), "atomics": ()}), "not known"),
}


@pytest.mark.parametrize(("machine", "found", "remedy"), ERRORS.values(), ids=ERRORS)
def test_what_prevents_use_is_an_error_with_a_remedy(machine, found, remedy):
    errors = [each for each in findings_of(machine) if each.prevents_use]
    assert [each for each in errors if found in each.found and remedy in each.remedy and each.remedy], errors


@pytest.mark.parametrize(("machine", "found", "remedy"), WARNINGS.values(), ids=WARNINGS)
def test_what_may_fail_is_a_warning_with_a_remedy(machine, found, remedy):
    everything = findings_of(machine)
    assert [each for each in everything if each.prevents_use] == []
    warnings = [each for each in everything if each.level is Level.WARNING]
    assert [each for each in warnings if found in each.found and remedy in each.remedy], warnings


@pytest.mark.parametrize(("machine", "found"), HARMLESS.values(), ids=HARMLESS)
def test_what_is_worth_knowing_is_said_and_harmless(machine, found):
    everything = findings_of(machine)
    assert [each for each in everything if each.level in (Level.WARNING, Level.ERROR)] == []
    assert len([each for each in everything if found in f"{each.found} > {each.remedy}"]) == 1


# --- what a group gets ---


def errors_of(machine: Machine, request: Request, needed_bytes: int | None = None) -> list[str]:
    return [each.subject for each in findings_of(machine, request, needed_bytes, GROUP) if each.prevents_use]


def test_the_default_and_why():
    verdict = choose(H200_HOST, Request())
    assert (verdict.backend, verdict.backend_reason, verdict.kernel) == ("ep_a2a", "the default", "IntraNode")
    assert (verdict.device, verdict.ranks_per_node) == ("cuda", (2,))
    assert choose(CPU_HOST, Request()).ranks_per_node == (4,)


def test_who_chose_the_backend(monkeypatch, tmp_path):
    monkeypatch.setenv("EP_A2A_BACKEND", "naive")
    assert choose(CPU_HOST, Request()).backend_reason == "named by EP_A2A_BACKEND"
    path = tmp_path / "choice.toml"
    path.write_text('all2all_backend = "allgather_reducescatter"')
    chosen = choose(CPU_HOST, Request(config_file=str(path)))
    assert (chosen.backend, chosen.backend_reason) == ("allgather_reducescatter", f"named by {path}")
    assert chosen.kernel == "torch.distributed"
    named = choose(CPU_HOST, Request(backend="naive", config_file=str(path)))
    assert (named.backend, named.backend_reason) == ("naive", "named by --backend")


def test_a_backend_that_is_not_there_is_an_error():
    (finding,) = findings_of(CPU_HOST, Request(backend="ep_a3a"), section=GROUP)
    assert finding.prevents_use
    assert "ep_a2a" in finding.remedy


def test_the_portable_backend_needs_no_peer_access():
    machine = changed(H200_HOST, driver={"access": without_pair(), "atomics": without_pair()})
    assert errors_of(machine, Request()) == ["peer access", "native atomics"]
    assert errors_of(machine, Request(backend="allgather_reducescatter")) == []


def test_several_nodes():
    two = choose(CPU_HOST, Request(ranks_per_node=(2, 2)))
    assert two.kernel == "InterNodeV1LL or InterNodeV1"
    assert choose(CPU_HOST, Request(ranks_per_node=(2, 2), max_tokens=512)).kernel == "InterNodeV1LL"
    assert choose(CPU_HOST, Request(ranks_per_node=(2, 2), max_tokens=513)).kernel == "InterNodeV1"
    assert errors_of(CPU_HOST, Request(ranks_per_node=(2, 2))) == []
    assert errors_of(CPU_HOST, Request(ranks_per_node=(2, 1))) == ["nodes"]
    assert errors_of(CPU_HOST, Request("allgather_reducescatter", ranks_per_node=(2, 1))) == []
    warned = [
        each
        for each in findings_of(H200_HOST, Request(ranks_per_node=(2, 2)), section=GROUP)
        if each.level is Level.WARNING
    ]
    assert "virtual nodes only" in warned[0].found


def test_memory_of_ranks_that_share_a_gpu_adds_up():
    alone = replace(H200_HOST, torch=replace(H200_HOST.torch, num_gpus=1))
    request = Request(ranks_per_node=(8,), max_tokens=4096)
    assert "memory" in errors_of(alone, request, 20 * GIB)
    assert errors_of(alone, replace(request, ranks_per_node=(1,)), 20 * GIB) == []
    assert errors_of(H200_HOST, request, 20 * GIB) == []


def test_memory_between_hosts_is_not_guessed():
    request = Request(ranks_per_node=(8, 8), max_tokens=4096)
    found = [each for each in findings_of(H200_HOST, request, 200 * GIB) if each.subject == "memory"]
    assert [each.level for each in found] == [Level.NOTE]
    assert "torch.distributed" in found[0].found


@pytest.mark.parametrize(
    ("request_", "needed_bytes", "subjects"),
    [
        (Request(ranks_per_node=(8,)), None, []),
        (Request("allgather_reducescatter", ranks_per_node=(8,)), None, ["ranks"]),
        (Request(hidden_dim=7168, quant="fp8_per_1x128"), None, []),
        (Request(hidden_dim=7164), None, ["hidden size"]),
        (Request(hidden_dim=2880, quant="fp8_per_1x128"), None, ["hidden size"]),
        (Request(max_tokens=4096), GIB, []),
        (Request(max_tokens=4096), 200 * GIB, ["memory"]),
        (Request(max_tokens=4096), None, []),
    ],
)
def test_shapes_and_memory(request_, needed_bytes, subjects):
    assert errors_of(H200_HOST, request_, needed_bytes) == subjects


# --- backends on other projects' libraries ---

SOME_SIZES = Capabilities(
    hidden_sizes=(4096, 7168),
    hidden_multiple=512,
    rank_counts=(2, 16),
    min_ranks=2,
    max_ranks=16,
    max_tokens=511,
    dispatch_casts=("none", "fp8_per_1x128"),
)


def library_findings(machine: Machine) -> list[Finding]:
    return [each for each in findings_of(machine, section="software") if each.subject == "library"]


def test_a_library_backend_runs_its_own_kernels():
    machine = with_backend(H200_HOST, "pplx", Capabilities(rdma="across nodes"))
    one, two = (choose(machine, Request("pplx", ranks_per_node=ranks)) for ranks in ((2,), (2, 2)))
    assert (one.kernel, two.kernel) == ("its own", "its own between nodes")
    assert "some-library's kernels" in one.kernel_reason
    assert "torch.distributed" not in one.kernel_reason
    assert errors_of(machine, Request("pplx")) == errors_of(machine, Request("pplx", ranks_per_node=(2, 2))) == []
    assert [each.level for each in library_findings(machine)] == [Level.OK]


def test_a_library_that_cannot_be_used_is_an_error_with_its_remedy():
    machine = with_backend(H200_HOST, "pplx", Capabilities(), problem="some-library is not installed")
    (finding,) = library_findings(machine)
    assert finding.prevents_use
    assert "some-library is not installed" in finding.found
    assert "pip install some-library" in finding.remedy
    unknown = replace(machine, backend=Backend("pplx", declaration_problem="ImportError: no"))
    assert library_findings(unknown)[0].prevents_use
    assert choose(unknown, Request("pplx")).kernel == "not known"
    (finding,) = library_findings(changed(unknown, torch={"version": None}))
    assert finding.level is Level.NOTE


@pytest.mark.parametrize(
    ("can", "request_", "found"),
    [
        (Capabilities(gpus=("AMD",)), Request(), "NVIDIA here; pplx needs AMD GPUs"),
        (Capabilities(single_node=True), Request(ranks_per_node=(1, 1)), "2 nodes; pplx takes one"),
        (SOME_SIZES, Request(hidden_dim=2048), "hidden size 2048; pplx takes hidden sizes 4096, 7168"),
        (SOME_SIZES, Request(ranks_per_node=(1,)), "1 ranks; pplx takes 2, 16 ranks"),
        (Capabilities(min_ranks=2), Request(ranks_per_node=(1,)), "1 rank; pplx takes 2 or more"),
        (Capabilities(max_ranks=2), Request(ranks_per_node=(2, 2)), "4 ranks; pplx takes at most 2"),
        (Capabilities(hidden_multiple=512), Request(hidden_dim=256), "hidden size 256; pplx takes multiples of 512"),
        (SOME_SIZES, Request(max_tokens=512), "512 tokens of a rank; pplx takes at most 511"),
        (SOME_SIZES, Request(quant="fp8_per_token"), "the cast fp8_per_token; pplx takes the casts none"),
    ],
)
def test_what_a_library_backend_does_not_get_is_an_error(can, request_, found):
    machine = with_backend(H200_HOST, "pplx", can)
    errors = [
        each for each in findings_of(machine, replace(request_, backend="pplx"), section=GROUP) if each.prevents_use
    ]
    assert [each for each in errors if found in each.found and "allgather_reducescatter" in each.remedy], errors
    fits = Request("pplx", hidden_dim=7168, max_tokens=511, quant="fp8_per_1x128")
    assert errors_of(with_backend(H200_HOST, "pplx", SOME_SIZES), fits) == []


FOR_AMD = Capabilities(gpus=("AMD",), rdma="across nodes")


def rocm(name: str, can: Capabilities | None = None, **torch: object) -> Machine:
    """A host of AMD GPUs, which NVIDIA's driver and tools know nothing of; a backend is asked for on it."""
    machine = changed(
        H200_HOST,
        torch={"cuda_build": None, "hip_build": "7.2", "nccl": None, "has_symmetric_memory": False, **torch},
        host={"gpu_direct": "", "compiler": ""},
        driver=Driver(problem="libcuda.so.1: cannot open shared object file"),
    )
    return replace(machine, backend=Backend(name)) if can is None else with_backend(machine, name, can)


@pytest.mark.parametrize("name", ["mori", "mori_high_throughput", "mori_low_latency"])
def test_rocm_is_no_error_for_backends_that_are_for_it(name):
    everything = findings_of(rocm(name, FOR_AMD), Request(name, ranks_per_node=(2, 2)))
    assert [each for each in everything if each.level in (Level.WARNING, Level.ERROR)] == []
    assert [each for each in everything if each.subject == "GPUs" and "2 visible to torch" in each.found]
    hidden = rocm(name, FOR_AMD, num_gpus=0, gpu_problem="no HIP GPUs")
    assert any("no HIP GPUs" in each.found and "/dev/kfd" in each.remedy for each in findings_of(hidden, Request(name)))


def test_rocm_with_other_backends():
    collective = findings_of(rocm("allgather_reducescatter"), Request("allgather_reducescatter"))
    assert [each for each in collective if each.prevents_use] == []
    assert [each for each in collective if "has not run there" in each.found]
    for name, can in (("ep_a2a", None), ("pplx", Capabilities())):
        errors = [each for each in findings_of(rocm(name, can), Request(name)) if each.prevents_use]
        assert f"the kernels of {name} hold NVIDIA's instructions" in errors[0].found


def test_a_library_backend_without_gpus():
    assert errors_of(with_backend(CPU_HOST, "pplx", Capabilities()), Request("pplx")) == ["GPUs of the backend"]
    assert errors_of(with_backend(CPU_HOST, "pplx", Capabilities(runs_on_cpu=True)), Request("pplx")) == []


def test_rdma_is_asked_for_where_the_backend_needs_it():
    machine = with_backend(H200_HOST, "pplx", Capabilities(rdma="across nodes"))
    two, none = Request("pplx", ranks_per_node=(2, 2)), replace(machine, rdma=())
    assert errors_of(none, two) == ["network"]
    assert errors_of(replace(machine, rdma=(replace(PORT, state="DOWN"),)), two) == ["network"]
    assert errors_of(none, Request("pplx")) == []
    assert errors_of(with_backend(none, "pplx", Capabilities()), two) == []
    warned = findings_of(changed(machine, host={"gpu_direct": ""}), two, section=GROUP)
    assert [each.remedy for each in warned if each.level is Level.WARNING and "nvidia_peermem" in each.found]


def test_fp8_needs_newer_gpus():
    machine = changed(H200_HOST, driver=old((8, 0)))
    assert errors_of(machine, Request(hidden_dim=7168, quant="fp8_per_token")) == ["fp8"]


def test_memory_of_cpu_ranks_is_shared_memory():
    space = replace(SHM, free_bytes=3 * GIB)
    machine = changed(CPU_HOST, host={"shared_memory": space})
    request = Request(ranks_per_node=(4,), max_tokens=64)
    assert errors_of(machine, request, GIB) == ["memory"]
    assert errors_of(machine, replace(request, ranks_per_node=(2,)), GIB) == []


def test_all_pairs_reach_each_other_in_the_healthy_machine():
    assert H200_HOST.driver.access == H200_HOST.driver.atomics == ALL
