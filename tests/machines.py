"""Machines as the doctor's probes would describe them, for its checks."""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.doctor.checks import run_checks
from ep_a2a.commands.doctor.choice import choose
from ep_a2a.commands.doctor.machine import (
    Driver,
    Folder,
    Gpu,
    Host,
    Installation,
    Machine,
    RdmaPort,
    Request,
    Sharing,
    Torch,
    Triton,
    Vllm,
)

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.finding import Finding

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
        tuned_tables=("sm_90_intra_node_ep2_combine.json",),
    ),
    torch=Torch(
        version="2.11.0+cu130",
        cuda_build="13.0",
        num_gpus=NUM_GPUS,
        architectures=("sm_90",),
        nccl="2.28.9",
        nccl_built="2.28.9",
        has_gloo=True,
        has_symmetric_memory=True,
        has_nvshmem=True,
    ),
    triton=Triton(version="3.6.0", cache_directory="/home/user/.triton/cache"),
    driver=Driver(
        version="580.95",
        cuda=(13, 0),
        gpus=(H200,) * NUM_GPUS,
        access=ALL,
        atomics=ALL,
        num_gpus_of_host=NUM_GPUS,
        links=(("X", "NV18"), ("NV18", "X")),
    ),
    sharing=Sharing("through a private MPS daemon", at_once=True),
    host=Host(
        python=(3, 12, 3),
        locked_memory_bytes=None,
        shared_memory=Folder("/dev/shm", mode=0o1777, size_bytes=64 * GIB, free_bytes=60 * GIB),
        triton_cache=Folder("/home/user/.triton/cache", size_bytes=900 * GIB, free_bytes=100 * GIB),
        compiler="/usr/bin/gcc",
        python_header=True,
        name="gpu-1",
        addresses=("10.0.0.7",),
        gpu_direct="nvidia_peermem",
    ),
    rdma=(RdmaPort("mlx5_0", "1", rate="400 Gb/sec (4X NDR)"),),
    vllm=Vllm(version="0.33.0"),
)
"""Two H200s on NVLink, with vLLM: nothing to complain about."""

CPU_HOST = Machine(
    installation=replace(H200_HOST.installation, packages=PACKAGES),
    torch=Torch(version="2.13.0+cpu", has_gloo=True, has_symmetric_memory=True),
    triton=Triton(version="3.9.0"),
    driver=Driver(problem="libcuda.so.1: cannot open shared object file"),
    host=replace(H200_HOST.host, gpu_direct=""),
)
"""A laptop: ranks are processes."""


def asked(machine: Machine, request: Request | None = None, needed_bytes: int | None = None) -> Machine:
    """The machine with what is asked of it, and what that gets."""
    request = request or Request()
    return replace(machine, request=request, choice=choose(machine, request), needed_bytes=needed_bytes)


def findings_of(
    machine: Machine, request: Request | None = None, needed_bytes: int | None = None, section: str = ""
) -> list[Finding]:
    """What all checks find on a machine of which something is asked, or those of one section."""
    found = run_checks(asked(machine, request, needed_bytes))
    return [each for name, findings in found.items() if section in ("", name) for each in findings]


def changed(machine: Machine, **changes: Any) -> Machine:
    """The machine with other facts: `torch={"version": None}` changes one fact of its torch, other values replace."""
    parts = {}
    for name, value in changes.items():
        present = getattr(machine, name)
        parts[name] = replace(present, **value) if is_dataclass(present) and isinstance(value, dict) else value
    return replace(machine, **parts)


def without_pair(matrix: tuple[tuple[bool, ...], ...] = ALL) -> tuple[tuple[bool, ...], ...]:
    """A matrix in which GPU 0 does not reach GPU 1."""
    rows = [list(row) for row in matrix]
    rows[0][1] = False
    return tuple(map(tuple, rows))
