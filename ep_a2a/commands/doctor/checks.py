"""The table of all checks, in the order of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor import checks_machine as on_machine
from ep_a2a.commands.doctor import checks_request as on_request
from ep_a2a.commands.doctor.finding import Check

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.finding import Finding
    from ep_a2a.commands.doctor.machine import Machine

SOFTWARE, GPUS, LINKS, ENGINES = "software", "GPUs", "links and memory", "engines"
VARIABLES, GROUP = "variables", "what a group gets"

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
    Check(GPUS, "driver", on_machine.driver),
    Check(GPUS, "capability", on_machine.capability),
    Check(GPUS, "MIG", on_machine.mig),
    Check(GPUS, "compute mode", on_machine.compute_mode),
    Check(GPUS, "GPU memory", on_machine.gpu_memory),
    Check(GPUS, "ranks that share a GPU", on_machine.sharing),
    Check(GPUS, "compiler", on_machine.compiler),
    Check(GPUS, "Triton's cache", on_machine.triton_cache),
    Check(GPUS, "TRITON_INTERPRET", on_machine.triton_interpret),
    Check(GPUS, "tuned tables", on_machine.tuned_tables),
    Check(LINKS, "links", on_machine.links),
    Check(LINKS, "peer access", on_machine.reach),
    Check(LINKS, "symmetric memory", on_machine.symmetric_memory),
    Check(LINKS, "CUDA IPC", on_machine.cuda_ipc),
    Check(LINKS, "/dev/shm", on_machine.shared_memory),
    Check(LINKS, "locked memory", on_machine.locked_memory),
    Check(LINKS, "NCCL", on_machine.nccl),
    Check(LINKS, "NVSHMEM", on_machine.nvshmem),
    Check(LINKS, "libraries", on_machine.libraries),
    Check(LINKS, "RDMA", on_machine.rdma),
    Check(LINKS, "GPUDirect RDMA", on_machine.gpu_direct),
    Check(LINKS, "host name", on_machine.host_name),
    Check(ENGINES, "vLLM", on_request.vllm),
    Check(ENGINES, "vLLM's plugins", on_request.vllm_plugins),
    Check(ENGINES, "ATOM", on_request.atom),
    Check(ENGINES, "ATOM in vLLM", on_request.atom_in_vllm),
    Check(VARIABLES, "variables", on_request.own_variables),
    Check(VARIABLES, "slow steps", on_request.slow_switches),
    Check(VARIABLES, on_request.VLLM_STEP, on_request.vllm_step),
    Check(VARIABLES, "other variables", on_request.other_variables),
    Check(GROUP, "backend", on_request.backend),
    Check(GROUP, "kernel", on_request.kernel),
    Check(GROUP, "hidden size", on_request.hidden_size),
    Check(GROUP, "fp8", on_request.fp8),
    Check(GROUP, "nodes", on_request.nodes),
    Check(GROUP, "peer access", on_request.needed_reach),
    Check(GROUP, "GPUs of the backend", on_request.library_gpus),
    Check(GROUP, "sizes", on_request.library_sizes),
    Check(GROUP, "network", on_request.library_network),
    Check(GROUP, "ranks", on_request.ranks),
    Check(GROUP, "memory", on_request.memory),
)


def run_checks(machine: Machine) -> dict[str, list[Finding]]:
    """Returns what all checks find, by section of the report."""
    sections: dict[str, list[Finding]] = {check.section: [] for check in CHECKS}
    for check in CHECKS:
        # A backend that does not exist has no kernel, sizes or memory.
        if check.section != GROUP or check.name == "backend" or not machine.choice.problem:
            sections[check.section] += check.findings(machine)
    return sections
