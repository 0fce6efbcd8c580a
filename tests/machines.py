"""Machines as the doctor's probes would describe them, for its checks."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ep_a2a.commands.doctor.checks import Finding, run_checks
from ep_a2a.commands.doctor.machine import Choice, Gpu, Machine
from ep_a2a.commands.doctor.probe import choose

GIB = 1 << 30
NUM_GPUS = 2
H200 = Gpu("NVIDIA H200", (9, 0), 132, 140 * GIB, 138 * GIB)

CPU_HOST = Machine(
    version="0.1.0",
    installed_version="0.1.0",
    vllm_entry_point=True,
    torch="2.13.0+cpu",
    triton="3.9.0",
    triton_cache="/home/user/.triton/cache",
    python="3.12.3",
    compiler="/usr/bin/gcc",
    python_header=True,
    shared_memory_bytes=64 * GIB,
    shared_memory_free_bytes=60 * GIB,
    host_name="gpu-1",
    addresses=("10.0.0.7",),
)
"""A laptop: ranks are processes."""

H200_HOST = replace(
    CPU_HOST,
    torch="2.11.0+cu130",
    triton="3.6.0",
    cuda_build="13.0",
    num_gpus=NUM_GPUS,
    gpus=(H200,) * NUM_GPUS,
    unreachable={"peer access": (), "native atomics": ()},
    driver="580.95",
    num_gpus_of_host=NUM_GPUS,
    rdma=("mlx5_0",),
    vllm="0.33.0",
)
"""Two H200s on NVLink, with vLLM: nothing to complain about."""


def choice_of(machine: Machine, backend: str | None = None, ranks_per_node: tuple[int, ...] = ()) -> Choice:
    """What a request gets on a machine, before its backend is asked."""
    return choose(machine.num_gpus, backend, None, ranks_per_node)


def findings_of(
    machine: Machine, request: Mapping[str, Any] = MappingProxyType({}), section: str = "", **backend: Any
) -> list[Finding]:
    """What all checks find on a machine of which something is asked, or those of one section.

    Args:
        machine: without judgement.
        request: arguments of `choice_of`. section: of the report.
        backend: facts of the backend that differ.
    """
    found = run_checks(machine, replace(choice_of(machine, **request), **backend))
    return [each for name, findings in found.items() if section in ("", name) for each in findings]


def with_facts(machine: Machine, facts: dict[str, Any]) -> Machine:
    """The machine with other facts by dotted names: {"gpus.1.num_sms": 20, "environment": {"A": "1"}}."""
    for name, value in facts.items():
        machine = _with_fact(machine, name.split("."), value)
    return machine


def _with_fact(part: Any, names: list[str], value: Any) -> Any:
    """A part with another fact; of a tuple the numbered member changes, or all; a dictionary is added to."""
    if isinstance(part, tuple) and names:
        chosen = range(len(part)) if not names[0].isdigit() else [int(names.pop(0))]
        return tuple(_with_fact(each, names, value) if at in chosen else each for at, each in enumerate(part))
    if names:
        return replace(part, **{names[0]: _with_fact(getattr(part, names[0]), names[1:], value)})
    if isinstance(value, dict):
        return {key: each for key, each in (part | value).items() if each is not None}
    return value
