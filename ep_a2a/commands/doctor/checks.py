"""The table of all checks, in the order of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor import checks_machine as on_machine
from ep_a2a.commands.doctor import checks_request as on_request
from ep_a2a.commands.doctor.finding import Check
from ep_a2a.config.file import DEFAULT_BACKEND

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.finding import Finding
    from ep_a2a.commands.doctor.machine import Machine

SOFTWARE, GPUS, LINKS, ENGINES = "software", "GPUs", "links and memory", "engines"
VARIABLES, GROUP = "variables", "what a group gets"


def _has_nvidia_gpus(m: Machine) -> bool:
    return m.has_gpus and not m.torch.hip_build


def _has_several_gpus(m: Machine) -> bool:
    return len(m.driver.gpus) > 1


def _has_vllm(m: Machine) -> bool:
    return m.vllm.version is not None and not m.vllm.problem


def _has_backend(m: Machine) -> bool:
    return bool(m.choice.backend)


def _runs_own_kernels(m: Machine) -> bool:
    return m.choice.backend == DEFAULT_BACKEND


def _runs_own_kernels_on_gpus(m: Machine) -> bool:
    return _runs_own_kernels(m) and m.torch.num_gpus > 0 and _has_several_gpus(m)


def _asks_for_memory(m: Machine) -> bool:
    return bool(m.choice.backend) and m.request.max_tokens is not None


CHECKS = (
    Check(SOFTWARE, "system", on_machine.system),
    Check(SOFTWARE, "ep_a2a", on_machine.package),
    Check(SOFTWARE, "torch", on_machine.torch),
    Check(SOFTWARE, "triton", on_machine.triton),
    Check(SOFTWARE, "packages", on_machine.packages),
    Check(GPUS, "GPUs", on_machine.gpus),
    Check(GPUS, "driver", on_machine.driver),
    Check(GPUS, "compiler", on_machine.compiler, _has_nvidia_gpus),
    Check(GPUS, "Triton's cache", on_machine.triton_cache, _has_nvidia_gpus),
    Check(LINKS, "/dev/shm", on_machine.shared_memory),
    Check(LINKS, "locked memory", on_machine.locked_memory),
    Check(LINKS, "libraries", on_machine.libraries),
    Check(LINKS, "RDMA", on_machine.rdma),
    Check(LINKS, "host name", on_machine.host_name),
    Check(ENGINES, "vLLM", on_request.vllm),
    Check(ENGINES, "vLLM's plugins", on_request.vllm_plugins, _has_vllm),
    Check(ENGINES, "ATOM", on_request.atom),
    Check(VARIABLES, "variables", on_request.variables),
    Check(VARIABLES, env.TIMEOUT_SECS.name, on_request.timeout),
    Check(VARIABLES, env.RDMA_DEVICES.name, on_request.rdma_devices),
    Check(VARIABLES, "switches", on_request.switches, _has_nvidia_gpus),
    Check(GROUP, "backend", on_request.backend),
    Check(GROUP, "kernel", on_request.kernel, _has_backend),
    Check(GROUP, "sizes", on_request.sizes, _has_backend),
    Check(GROUP, "fp8", on_request.fp8, _has_backend),
    Check(GROUP, "nodes", on_request.nodes, _runs_own_kernels),
    Check(GROUP, "peer access", on_request.reach, _runs_own_kernels_on_gpus),
    Check(GROUP, "ranks", on_request.ranks, _has_backend),
    Check(GROUP, "memory", on_request.memory, _asks_for_memory),
)


def run_checks(machine: Machine) -> dict[str, list[Finding]]:
    """Returns what all checks find, by section of the report."""
    sections: dict[str, list[Finding]] = {check.section: [] for check in CHECKS}
    for check in CHECKS:
        sections[check.section] += check.findings(machine)
    return sections
