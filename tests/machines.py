"""Machines as the doctor's probes would describe them, for its checks."""

from dataclasses import replace
from typing import Any

from ep_a2a.commands.doctor.checks import run_checks
from ep_a2a.commands.doctor.finding import Finding
from ep_a2a.commands.doctor.machine import (
    Driver,
    Folder,
    Gpu,
    Host,
    Imported,
    Installation,
    Machine,
    RdmaPort,
    Request,
    Torch,
    Vllm,
)
from ep_a2a.commands.doctor.probe import choose

GIB = 1 << 30
NUM_GPUS = 2
ALL = ((True,) * NUM_GPUS,) * NUM_GPUS
PACKAGES = {"numpy": "2.4.0", "typer": "0.20.0", "rich": "14.0"}
H200 = Gpu("NVIDIA H200", (9, 0), 132, 140 * GIB, 138 * GIB)

H200_HOST = Machine(
    installation=Installation(
        version="0.1.0",
        installed_version="0.1.0",
        vllm_entry_point=True,
        atom_entry_point=True,
        packages=PACKAGES | {"cuda-bindings": "13.0", "nvidia-nccl-cu13": "2.28.9"},
    ),
    torch=Torch("2.11.0+cu130", cuda_build="13.0", num_gpus=NUM_GPUS),
    triton=Imported("3.6.0"),
    driver=Driver("", "580.95", (13, 0), (H200,) * NUM_GPUS, access=ALL, atomics=ALL, num_gpus_of_host=NUM_GPUS),
    host=Host(
        python="3.12.3",
        shared_memory=Folder("/dev/shm", size_bytes=64 * GIB, free_bytes=60 * GIB),
        triton_cache=Folder("/home/user/.triton/cache", size_bytes=900 * GIB, free_bytes=100 * GIB),
        compiler="/usr/bin/gcc",
        python_header=True,
        name="gpu-1",
        addresses=("10.0.0.7",),
    ),
    rdma=(RdmaPort("mlx5_0", "1", rate="400 Gb/sec (4X NDR)"),),
    vllm=Vllm(version="0.33.0"),
)
"""Two H200s on NVLink, with vLLM: nothing to complain about."""

CPU_HOST = Machine(
    installation=replace(H200_HOST.installation, packages=PACKAGES),
    torch=Torch(version="2.13.0+cpu"),
    triton=Imported("3.9.0"),
    driver=Driver(problem="libcuda.so.1: cannot open shared object file"),
    host=H200_HOST.host,
)
"""A laptop: ranks are processes."""


def findings_of(machine: Machine, request: Request | None = None, section: str = "", **backend: Any) -> list[Finding]:
    """What all checks find on a machine of which something is asked, or those of one section.

    Args:
        machine: with the backend's description, or with none.
        request: what is asked. section: of the report.
        backend: facts of the backend that differ.
    """
    request = request or Request()
    choice = choose(request, machine.torch.num_gpus)
    described = replace(machine.backend, name=machine.backend.name or choice.backend, **backend)
    found = run_checks(replace(machine, request=request, choice=choice, backend=described))
    return [each for name, findings in found.items() if section in ("", name) for each in findings]


def with_facts(machine: Machine, facts: dict[str, Any]) -> Machine:
    """The machine with other facts by dotted names: {"driver.gpus.1.num_sms": 20, "environment": {"A": "1"}}."""
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
