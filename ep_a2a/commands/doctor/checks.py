"""All checks, in the order in which they are printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.commands.doctor import (
    checks_backend,
    checks_engines,
    checks_gpu,
    checks_links,
    checks_software,
    checks_variables,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.commands.doctor.diagnostic import Finding
    from ep_a2a.commands.doctor.system_info import Machine

CHECKS: dict[str, tuple[Callable[[Machine], list[Finding]], ...]] = {
    "software": (
        checks_software.check_python,
        checks_software.check_system,
        checks_software.check_installation,
        checks_software.check_torch,
        checks_software.check_triton,
        checks_software.check_packages,
        checks_backend.check_library,
    ),
    "GPUs": (
        checks_gpu.check_gpus,
        checks_gpu.check_driver,
        checks_gpu.check_capability,
        checks_gpu.check_sharing,
        checks_gpu.check_free_memory,
        checks_gpu.check_compilation,
        checks_gpu.check_tuning,
    ),
    "links and memory": (
        checks_links.check_gpu_links,
        checks_links.check_symmetric_memory,
        checks_links.check_shared_memory,
        checks_links.check_locked_memory,
        checks_links.check_nccl,
        checks_links.check_nvshmem,
        checks_links.check_duplicate_libraries,
        checks_links.check_rdma,
        checks_links.check_host_name,
    ),
    "engines": (checks_engines.check_vllm, checks_engines.check_atom),
    "variables": (
        checks_variables.check_own_variables,
        checks_variables.check_other_variables,
        checks_variables.list_other_variables,
    ),
}
"""By section of the report."""


def run_checks(machine: Machine) -> dict[str, list[Finding]]:
    """What all checks say of a machine, by section."""
    return {section: [each for check in checks for each in check(machine)] for section, checks in CHECKS.items()}
