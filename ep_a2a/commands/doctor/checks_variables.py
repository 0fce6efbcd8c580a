"""Checks of environment variables: this package's, and those of other software that change what it does."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a import env
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Diagnostic, first, refused
from ep_a2a.config.file import DEFAULT_BACKEND, read_config_file
from ep_a2a.config.transports import INTERNODE_TRANSPORTS
from ep_a2a.errors import EpA2AError, did_you_mean
from ep_a2a.managers.registry import check_backend_name
from ep_a2a.tuning.tables import NO_TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.commands.doctor.system_info import SystemInfo

LEVELS = tuple(logging.getLevelNamesMapping())
VLLM_STEP = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
VLLM_STEP_SECS = 300
"""vLLM's own bound of a step, unless VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS says otherwise."""
OTHERS = {
    "CUDA_LAUNCH_BLOCKING": "each launch blocks: steps are slow, and two steps on one rank cannot overlap",
    "CUDA_DEVICE_MAX_CONNECTIONS": "one queue for all streams: steps of two ops that overlap may wait for each other",
    "NCCL_P2P_DISABLE": "NCCL goes by way of the host; ep_a2a's own kernels ignore it",
    "NCCL_IB_DISABLE": "NCCL does not use RDMA between nodes",
    "NCCL_SHM_DISABLE": "NCCL does not use shared memory inside a node",
}
"""Effects of variables that are 1: slow steps, or steps that wait for each other."""


def check_variables(info: SystemInfo) -> Iterator[Diagnostic]:
    """Checks the variables that are set."""
    variables = info.environment
    own = dict.fromkeys(info.variable_problems, "")
    own |= {name: value for name, value in variables.items() if name.startswith("EP_A2A_")}
    problems = [problem for name, value in own.items() for problem in _own_variable(info, name, value)]
    yield from problems or [Diagnostic("variables", OK, _listed(own) or "no EP_A2A_* is set")]
    for name, effect in OTHERS.items():
        yield from first(
            name,
            (
                WARNING,
                variables.get(name) == "1" and info.has_gpus,
                f"{name}=1: {effect}",
                "Unset it, unless it is meant.",
            ),
        )
    yield from first(
        VLLM_STEP,
        (
            WARNING if info.vllm.version is None else ERROR,
            math.isnan(_vllm_step_secs(info)),
            f"{VLLM_STEP}={variables.get(VLLM_STEP)} is no whole number: vLLM cannot read it and exits",
            "Correct or unset it.",
        ),
    )
    others = _listed({n: v for n, v in variables.items() if not n.startswith("EP_A2A_") and n not in OTHERS})
    yield from first("other variables", (NOTE, others, others))


def _own_variable(info: SystemInfo, name: str, value: str) -> list[Diagnostic]:
    """Checks one EP_A2A_* variable."""

    def of(variable: env.Variable[Any]) -> str:
        return value if name == variable.name else ""

    known = [variable.name for variable in env.VARIABLES]
    text, problem = f"{name}={value}", info.variable_problems.get(name, "")
    if not problem and (refusal := _backend_refusal(of(env.CONFIG), of(env.BACKEND))):
        return [refused(name, refusal)]
    devices = ", ".join(sorted({port.device for port in info.rdma})) or "none"
    named = "" if value.startswith("^") else of(env.RDMA_DEVICES).strip()
    absent = ", ".join(each for each in named.split(",") if each and each.strip() not in devices.split(", "))
    # NaN: not known, and no comparison with it holds.
    secs = float(value) if of(env.TIMEOUT_SECS) and not problem else math.nan
    vllm_secs = math.nan if info.vllm.version is None else _vllm_step_secs(info)
    hca = info.environment.get("NCCL_IB_HCA")
    cuda_major = (info.torch.cuda_build or "13").partition(".")[0]
    return first(
        name,
        (ERROR, problem, f"{text}: {problem}", "Correct or unset it; docs/env.md lists them all."),
        (
            WARNING,
            name not in known,
            f"{text} is no variable of this version: it does nothing",
            did_you_mean(name, known) or "docs/env.md lists them all.",
        ),
        (
            ERROR,
            of(env.INTERNODE_TRANSPORT) and value not in INTERNODE_TRANSPORTS,
            f"{text} is not in this version",
            f"Use one of {', '.join(INTERNODE_TRANSPORTS)}.",
        ),
        (
            ERROR,
            of(env.INTERNODE_TRANSPORT) == "nvshmem" and not info.installation.has_nvshmem,
            f"{text}, and no package nvidia-nvshmem",
            f"pip install nvidia-nvshmem-cu{cuda_major}.",
        ),
        (
            ERROR,
            of(env.TUNING_DIR) not in ("", NO_TABLES) and not Path(value).is_dir(),
            f"{text} is no folder",
            "Make it, or unset the variable.",
        ),
        (
            ERROR,
            of(env.LOG_LEVEL) and value.upper() not in LEVELS,
            f"{text} is no level",
            f"One of {', '.join(LEVELS)}.",
        ),
        (ERROR, absent, f"no device {absent} on this host; there are: {devices}", "Correct it."),
        (WARNING, of(env.RDMA_DEVICES) and hca, f"does not count: NCCL_IB_HCA={hca} is set", "Unset one of the two."),
        (
            WARNING,
            secs >= vllm_secs,
            f"{secs:g} s: vLLM gives a step up after {vllm_secs:g} s, and cannot say which rank was missing",
            f"Lower it below {vllm_secs:g}.",
        ),
    )


def _backend_refusal(config_file: str, backend: str) -> EpA2AError | None:
    """Returns the error that a backend's name, or the one in a config file, leads to."""
    try:
        if config_file:
            backend = read_config_file(config_file).all2all_backend or DEFAULT_BACKEND
        if backend:
            check_backend_name(backend)
    except EpA2AError as problem:
        return problem
    return None


def _vllm_step_secs(info: SystemInfo) -> float:
    """Returns vLLM's own bound of a step; NaN where vLLM cannot read the variable."""
    try:
        return int(info.environment.get(VLLM_STEP, VLLM_STEP_SECS))
    except ValueError:
        return math.nan


def _listed(variables: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())
