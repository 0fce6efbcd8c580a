"""Checks of environment variables: ours, and those of others that change what this package does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.checks_links import has_nvshmem
from ep_a2a.commands.doctor.diagnostic import Finding, error, note, ok, warning
from ep_a2a.config.enums import RAILS
from ep_a2a.config.file import read_config_file
from ep_a2a.errors import EpA2AError, did_you_mean
from ep_a2a.managers.registry import check_backend_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.commands.doctor.system_info import Machine

NO_TABLES = "none"
VLLM_STEP = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
VLLM_STEP_SECS = 300
"""vLLM's own bound of a step, unless VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS says otherwise."""


def check_own_variables(machine: Machine) -> list[Finding]:
    """Names and values of EP_A2A_*."""
    ours = {name: value for name, value in machine.environment.items() if name.startswith("EP_A2A_")}
    known = [variable.name for variable in env.VARIABLES]
    findings = [
        error(name, f"{name}={ours.get(name, '')}: {problem}", "Correct or unset it; docs/env.md lists them all.")
        for name, problem in machine.variable_problems.items()
    ]
    for name, value in ours.items():
        if name not in known:
            remedy = did_you_mean(name, known) or "docs/env.md lists them all."
            findings.append(warning(name, f"{name}={value} is no variable of this version: it does nothing", remedy))
        elif name not in machine.variable_problems:
            findings += _judge(name, value, machine)
    return findings or [ok("variables", ", ".join(f"{n}={v}" for n, v in ours.items()) or "no EP_A2A_* is set")]


def _judge(name: str, value: str, machine: Machine) -> list[Finding]:
    """What is wrong with a variable's value beyond its form."""
    if not value:
        return []
    if name == env.BACKEND.name:
        return _raised(name, lambda: check_backend_name(value))
    if name == env.CONFIG.name:
        return _raised(name, lambda: check_backend_name(read_config_file(value).all2all_backend or "ep_a2a"))
    if name == env.RAIL.name and value not in RAILS:
        return [error(name, f"{name}={value} is not in this version", f"Use one of {', '.join(RAILS)}.")]
    if name == env.RAIL.name and value == "nvshmem" and not has_nvshmem(machine):
        return [error(name, f"{name}={value}, and no package nvidia-nvshmem", "pip install nvidia-nvshmem-cu13.")]
    if name == env.TUNING_DIR.name and value != NO_TABLES and not Path(value).is_dir():
        return [error(name, f"{name}={value} is no folder", "Make it, or unset the variable.")]
    if name == env.LOG_LEVEL.name and value.upper() not in logging.getLevelNamesMapping():
        return [error(name, f"{name}={value} is no level", f"One of {', '.join(logging.getLevelNamesMapping())}.")]
    if name == env.RDMA_DEVICES.name:
        return _unknown_devices(name, value, machine)
    if name == env.TIMEOUT_SECS.name:
        return _long_wait(name, float(value), machine)
    return []


def _raised(name: str, work: Callable[[], object]) -> list[Finding]:
    try:
        work()
    except EpA2AError as problem:
        return [error(name, f"expected {problem.expected}; got {problem.got}", problem.remedy)]
    return []


def _unknown_devices(name: str, value: str, machine: Machine) -> list[Finding]:
    have = sorted({port.device for port in machine.rdma})
    unknown = [device for device in value.strip().removeprefix("^").split(",") if device.strip() not in have]
    if unknown and not value.startswith("^"):
        there = ", ".join(have) or "none"
        return [error(name, f"no device {', '.join(unknown)} on this host; there are: {there}", "Correct it.")]
    standing = machine.environment.get("NCCL_IB_HCA")
    if standing:
        return [warning(name, f"does not count: NCCL_IB_HCA={standing} is set", "Unset one of the two.")]
    return []


def _long_wait(name: str, secs: float, machine: Machine) -> list[Finding]:
    limit = _vllm_step_secs(machine)
    if limit is None:
        return []
    if machine.vllm.version is not None and secs >= limit:
        return [
            warning(name, f"{secs:g} s: vLLM gives a step up after {limit:g} s, and cannot say which rank was missing",
                    f"Lower it below {limit:g}.")
        ]  # fmt: skip
    return []


def _vllm_step_secs(machine: Machine) -> int | None:
    """vLLM's own bound of a step; None where the variable is none that vLLM can read."""
    try:
        return int(machine.environment.get(VLLM_STEP, VLLM_STEP_SECS))
    except ValueError:
        return None


OTHERS = {
    "CUDA_LAUNCH_BLOCKING": "every launch is waited for: steps are slow, and two that overlap on one rank cannot",
    "CUDA_DEVICE_MAX_CONNECTIONS": "one queue for all streams: steps of two ops that overlap may wait for each other",
    "NCCL_P2P_DISABLE": "NCCL goes by way of the host; ep_a2a's own kernels do not heed it",
    "NCCL_IB_DISABLE": "NCCL does not use RDMA between nodes",
    "NCCL_SHM_DISABLE": "NCCL does not use shared memory inside a node",
}
"""Variables that slow things down or let them wait where they are 1."""


def check_other_variables(machine: Machine) -> list[Finding]:
    """Variables of CUDA, NCCL and vLLM that matter here."""
    found = [
        warning(name, f"{name}=1: {what}", "Unset it, unless it is meant.")
        for name, what in OTHERS.items()
        if machine.environment.get(name) == "1" and machine.has_gpus
    ]
    if _vllm_step_secs(machine) is None:
        level = warning if machine.vllm.version is None else error
        text = f"{VLLM_STEP}={machine.environment[VLLM_STEP]} is no whole number: vLLM cannot read it, and ends"
        found.append(level(VLLM_STEP, text, "Correct or unset it."))
    return found


def list_other_variables(machine: Machine) -> list[Finding]:
    """What else is set, for whoever reads a report."""
    rest = {n: v for n, v in machine.environment.items() if not n.startswith("EP_A2A_") and n not in OTHERS}
    return [note("other variables", ", ".join(f"{name}={value}" for name, value in rest.items()))] if rest else []
