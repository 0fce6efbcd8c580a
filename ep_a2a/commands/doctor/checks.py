"""The table of all checks, in the order of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor import checks_machine as on_machine
from ep_a2a.commands.doctor import checks_request as on_request
from ep_a2a.commands.doctor.finding import Check
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.finding import Finding
    from ep_a2a.commands.doctor.machine import Machine

SOFTWARE, GPUS, LINKS, ENGINES = "software", "GPUs", "links and memory", "engines"
VARIABLES, GROUP = "variables", "what a group gets"


def _has_gpus(m: Machine) -> bool:
    return m.has_gpus


def _has_nvidia_gpus(m: Machine) -> bool:
    return m.has_gpus and not m.torch.hip_build


def _has_several_gpus(m: Machine) -> bool:
    return len(m.driver.gpus) > 1


def _has_vllm(m: Machine) -> bool:
    return m.vllm.version is not None and not m.vllm.version_problem


def _has_backend(m: Machine) -> bool:
    return bool(m.choice.backend)


def _runs_own_kernels(m: Machine) -> bool:
    return m.choice.backend == DEFAULT_BACKEND


def _asks_for_memory(m: Machine) -> bool:
    return bool(m.choice.backend) and m.request.max_tokens is not None


CHECKS = (
    Check(SOFTWARE, "python", on_machine.python),
    Check(SOFTWARE, "system", on_machine.system),
    Check(SOFTWARE, "ep_a2a", on_machine.package),
    Check(SOFTWARE, "torch", on_machine.torch),
    Check(SOFTWARE, "gloo", on_machine.gloo),
    Check(SOFTWARE, "triton", on_machine.triton),
    Check(SOFTWARE, "packages", on_machine.packages),
    Check(SOFTWARE, "library", on_request.library),
    Check(GPUS, "GPUs", on_machine.gpus),
    Check(GPUS, "driver", on_machine.driver, _has_nvidia_gpus),
    Check(GPUS, "capability", on_machine.capability),
    Check(GPUS, "MIG", on_machine.mig),
    Check(GPUS, "compute mode", on_machine.compute_mode),
    Check(GPUS, "GPU memory", on_machine.gpu_memory),
    Check(GPUS, "ranks that share a GPU", on_machine.sharing, _has_nvidia_gpus),
    Check(GPUS, "compiler", on_machine.compiler, _has_nvidia_gpus),
    Check(GPUS, "Triton's cache", on_machine.triton_cache, _has_nvidia_gpus),
    Check(GPUS, "TRITON_INTERPRET", on_machine.triton_interpret, _has_nvidia_gpus),
    Check(GPUS, "tuned tables", on_machine.tuned_tables, _has_several_gpus),
    Check(LINKS, "links", on_machine.links, _has_several_gpus),
    Check(LINKS, "peer access", on_machine.reach, _has_several_gpus),
    Check(LINKS, "symmetric memory", on_machine.symmetric_memory, _has_nvidia_gpus),
    Check(LINKS, "CUDA IPC", on_machine.cuda_ipc, _has_nvidia_gpus),
    Check(LINKS, "/dev/shm", on_machine.shared_memory),
    Check(LINKS, "locked memory", on_machine.locked_memory),
    Check(LINKS, "NCCL", on_machine.nccl),
    Check(LINKS, "NVSHMEM", on_machine.nvshmem, _has_gpus),
    Check(LINKS, "libraries", on_machine.libraries),
    Check(LINKS, "RDMA", on_machine.rdma),
    Check(LINKS, "GPUDirect RDMA", on_machine.gpu_direct, _has_nvidia_gpus),
    Check(LINKS, "host name", on_machine.host_name),
    Check(ENGINES, "vLLM", on_request.vllm),
    Check(ENGINES, "vLLM's plugins", on_request.vllm_plugins, _has_vllm),
    Check(ENGINES, "ATOM", on_request.atom),
    Check(ENGINES, "ATOM in vLLM", on_request.atom_in_vllm),
    Check(VARIABLES, "variables", on_request.own_variables),
    Check(VARIABLES, "slow steps", on_request.slow_switches),
    Check(VARIABLES, on_request.VLLM_STEP, on_request.vllm_step),
    Check(VARIABLES, "other variables", on_request.other_variables),
    Check(GROUP, "backend", on_request.backend),
    Check(GROUP, "kernel", on_request.kernel, _has_backend),
    Check(GROUP, "hidden size", on_request.hidden_size, _has_backend),
    Check(GROUP, "fp8", on_request.fp8, _has_backend),
    Check(GROUP, "nodes", on_request.nodes, _runs_own_kernels),
    Check(GROUP, "peer access", on_request.needed_reach, _runs_own_kernels),
    Check(GROUP, "GPUs of the backend", on_request.library_gpus, _has_backend),
    Check(GROUP, "sizes", on_request.library_sizes, _has_backend),
    Check(GROUP, "network", on_request.library_network, _has_backend),
    Check(GROUP, "ranks", on_request.ranks, _has_backend),
    Check(GROUP, "memory", on_request.memory, _asks_for_memory),
)


def run_checks(machine: Machine) -> dict[str, list[Finding]]:
    """Returns what all checks find, by section of the report."""
    sections: dict[str, list[Finding]] = {check.section: [] for check in CHECKS}
    for check in CHECKS:
        sections[check.section] += check.findings(machine)
    return sections
