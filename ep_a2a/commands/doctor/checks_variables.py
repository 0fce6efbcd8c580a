"""Checks of environment variables: this package's, and those of other software that change what it does."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a import env
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Case, Check, always
from ep_a2a.config.file import read_config_file
from ep_a2a.config.transports import INTERNODE_TRANSPORTS
from ep_a2a.errors import EpA2AError, did_you_mean
from ep_a2a.managers.registry import check_backend_name
from ep_a2a.tuning.tables import NO_TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.commands.doctor.system_info import SystemInfo

LEVELS = ", ".join(logging.getLevelNamesMapping())
VLLM_STEP = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
VLLM_STEP_SECS = 300
"""vLLM's own bound of a step, unless VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS says otherwise."""
OTHERS = {
    "CUDA_LAUNCH_BLOCKING": "every launch is waited for: steps are slow, and two that overlap on one rank cannot",
    "CUDA_DEVICE_MAX_CONNECTIONS": "one queue for all streams: steps of two ops that overlap may wait for each other",
    "NCCL_P2P_DISABLE": "NCCL goes by way of the host; ep_a2a's own kernels do not heed it",
    "NCCL_IB_DISABLE": "NCCL does not use RDMA between nodes",
    "NCCL_SHM_DISABLE": "NCCL does not use shared memory inside a node",
}
"""Variables that slow things down, or let steps wait for each other, where they are 1."""


@dataclass(frozen=True)
class SetVariable:
    """A variable EP_A2A_* that is set, on its machine."""

    name: str
    value: str
    info: SystemInfo

    def of(self, variable: env.Variable[Any]) -> str:
        """The value, where it is this variable; else ""."""
        return self.value if self.name in (variable.name, variable.former_name) else ""

    @property
    def present_name(self) -> str:
        """The variable's name, where this one is its former name; else ""."""
        return next((each.name for each in env.VARIABLES if each.former_name == self.name), "")

    @property
    def problem(self) -> str:
        """Why its text cannot be used; "" where it can."""
        return self.info.variable_problems.get(self.name, "")

    @property
    def is_unknown(self) -> bool:
        """Whether this version has no such variable."""
        return not self.present_name and self.name not in {variable.name for variable in env.VARIABLES}

    @property
    def nearest(self) -> str:
        """What to use in place of a variable that is unknown."""
        return did_you_mean(self.name, [variable.name for variable in env.VARIABLES]) or "docs/env.md lists them all."

    @functools.cached_property
    def refusal(self) -> EpA2AError | None:
        """The error that a backend's name, or the one in a config file, leads to."""
        try:
            if self.of(env.CONFIG):
                check_backend_name(read_config_file(self.value).all2all_backend or "ep_a2a")
            elif self.of(env.BACKEND):
                check_backend_name(self.value)
        except EpA2AError as problem:
            return problem
        return None

    @property
    def devices(self) -> str:
        """The RDMA devices of this host."""
        return ", ".join(sorted({port.device for port in self.info.rdma})) or "none"

    @property
    def unknown_devices(self) -> str:
        """RDMA devices that it names, none to be left out, and that this host lacks."""
        named = [] if self.value.startswith("^") else self.of(env.RDMA_DEVICES).strip().split(",")
        return ", ".join(name for name in named if name and name.strip() not in self.devices.split(", "))

    @property
    def secs(self) -> float:
        """The value as seconds."""
        return float(self.value)

    @property
    def vllm_secs(self) -> int | None:
        """vLLM's bound of a step, where there is a vLLM and its variable can be read."""
        return None if self.info.vllm.version is None else _vllm_step_secs(self.info)


def _own(info: SystemInfo) -> Iterator[SetVariable]:
    """This package's variables, those with problems first."""
    ours = dict.fromkeys(info.variable_problems, "")
    ours |= {name: value for name, value in info.environment.items() if name.startswith("EP_A2A_")}
    yield from (SetVariable(name, value, info) for name, value in ours.items())


def _vllm_step_secs(info: SystemInfo) -> int | None:
    """vLLM's own bound of a step; None where vLLM cannot read the variable."""
    try:
        return int(info.environment.get(VLLM_STEP, VLLM_STEP_SECS))
    except ValueError:
        return None


def _unreadable_step(info: SystemInfo) -> tuple[SystemInfo, ...]:
    return (info,) if _vllm_step_secs(info) is None else ()


def _slowing(info: SystemInfo) -> Iterator[tuple[str, str]]:
    for name, effect in OTHERS.items():
        if info.environment.get(name) == "1" and info.has_gpus:
            yield name, effect


def _other_variables(info: SystemInfo) -> Iterator[str]:
    rest = {n: v for n, v in info.environment.items() if not n.startswith("EP_A2A_") and n not in OTHERS}
    if rest:
        yield ", ".join(f"{name}={value}" for name, value in rest.items())


check_own_variables = Check("{it.name}", _own,
    Case(ERROR, lambda it: it.problem, "{it.name}={it.value}: {it.problem}",
         "Correct or unset it; docs/env.md lists them all."),
    Case(WARNING, lambda it: it.is_unknown, "{it.name}={it.value} is no variable of this version: it does nothing",
         "{it.nearest}"),
    Case(ERROR, lambda it: it.refusal, "expected {it.refusal.expected}; got {it.refusal.got}", "{it.refusal.remedy}"),
    Case(ERROR, lambda it: it.of(env.INTERNODE_TRANSPORT) and it.value not in INTERNODE_TRANSPORTS,
         "{it.name}={it.value} is not in this version",
         f"Use one of {', '.join(INTERNODE_TRANSPORTS)}."),
    Case(ERROR, lambda it: it.of(env.INTERNODE_TRANSPORT) == "nvshmem" and not it.info.installation.has_nvshmem,
         "{it.name}={it.value}, and no package nvidia-nvshmem", "pip install nvidia-nvshmem-cu13."),
    Case(ERROR, lambda it: it.of(env.TUNING_DIR) not in ("", NO_TABLES) and not Path(it.value).is_dir(),
         "{it.name}={it.value} is no folder", "Make it, or unset the variable."),
    Case(ERROR, lambda it: it.of(env.LOG_LEVEL) and it.value.upper() not in LEVELS.split(", "),
         "{it.name}={it.value} is no level", f"One of {LEVELS}."),
    Case(ERROR, lambda it: it.unknown_devices,
         "no device {it.unknown_devices} on this host; there are: {it.devices}", "Correct it."),
    Case(WARNING, lambda it: it.of(env.RDMA_DEVICES) and it.info.environment.get("NCCL_IB_HCA"),
         "does not count: NCCL_IB_HCA={it.info.environment[NCCL_IB_HCA]} is set", "Unset one of the two."),
    Case(WARNING, lambda it: it.present_name, "{it.name} is the former name of {it.present_name}",
         "Set {it.present_name}."),
    Case(WARNING, lambda it: it.of(env.TIMEOUT_SECS) and it.vllm_secs is not None and it.secs >= it.vllm_secs,
         "{it.secs:g} s: vLLM gives a step up after {it.vllm_secs:g} s, and cannot say which rank was missing",
         "Lower it below {it.vllm_secs:g}."))  # fmt: skip

VARIABLES = (
    check_own_variables,
    Check("variables", lambda info: () if [*_own(info)] else (info,), Case(OK, always, "no EP_A2A_* is set")),
    Check("variables", lambda info: (
            [", ".join(f"{each.name}={each.value}" for each in _own(info))]
            if [*_own(info)] and not check_own_variables(info) else []
        ),
        Case(OK, always, "{it}")),
    Check("{it[0]}", _slowing, Case(WARNING, always, "{it[0]}=1: {it[1]}", "Unset it, unless it is meant.")),
    Check(VLLM_STEP, _unreadable_step,
        Case(WARNING, lambda it: it.vllm.version is None, f"{VLLM_STEP}={{it.environment[{VLLM_STEP}]}} is no whole "
             "number: vLLM cannot read it, and ends", "Correct or unset it."),
        Case(ERROR, always, f"{VLLM_STEP}={{it.environment[{VLLM_STEP}]}} is no whole number: vLLM cannot read it, and "
             "ends", "Correct or unset it.")),
    Check("other variables", _other_variables, Case(NOTE, always, "{it}")),
)  # fmt: skip
