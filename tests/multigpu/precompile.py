"""Fills Triton's disk cache for tests with EP_A2A_TEST_COMPILE_WHEN_USED=1: python -m tests.multigpu.precompile.

Not needed for the tests to pass. Each variant is compiled once, by one of as many processes as the host has cores;
without it all ranks of a test compile the same variants at once.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.ops.intra_node import IntraNodeEngine
from ep_a2a.ops.rings import RingEngine
from ep_a2a.ops.sm_share import share_of
from ep_a2a.topology.gpu_share import ranks_per_gpu
from tests.cases.fault_cases import BULK, LOW_LATENCY, case_of
from tests.cases.op_cases import Case
from tests.multigpu.cases import REPLAYED_RINGS, fitted, op_cases, ring_cases, shared_cases, soaked_sizes, special_cases
from tests.multigpu.used_variants import used_by

MAX_PROCESSES = 48
# its server imports this module once, for all processes
PROCESSES = multiprocessing.get_context("forkserver")


class Task(NamedTuple):
    """A variant: a case whose steps launch it, whether they give combine ids, and its number among theirs."""

    case: Case
    gives_ids: bool
    number: int


def variants_of(case: Case, gives_ids: bool) -> list[CompiledKernel]:
    """The variants that steps of a case launch, as a rank of this host has them."""
    config, device = case.config(0), torch.device("cuda", 0)
    table = torch.zeros(64, config.world_size, dtype=torch.int64, device=device)
    engine = (RingEngine if config.uses_rings else IntraNodeEngine)(config, table, device)
    sharing = ranks_per_gpu(config.world_size, torch.cuda.device_count())
    if sharing > 1:
        engine.limit_sms(share_of(engine.kernels.num_sms, sharing, 1))
    return used_by(engine, case, gives_ids=gives_ids)


def compile_task(task: Task) -> float:
    """Compiles one variant in this process; returns the seconds that it took."""
    start = time.monotonic()
    variants_of(task.case, task.gives_ids)[task.number].compile()
    return time.monotonic() - start


def keep_to_one_core(num_started: Any) -> None:
    """Begins a process: MLIR would start a thread of its own for every core that the process may use."""
    with num_started:
        number, num_started.value = num_started.value, num_started.value + 1
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def find_tasks() -> list[Task]:
    """What there is to compile, each variant once."""
    cases = {f"op-{name}": case for name, case in op_cases()} | shared_cases()
    cases |= {f"special-{name}": case for name, (_, case) in special_cases().items()}
    rings = ring_cases() | REPLAYED_RINGS
    cases |= {f"rings-{name}": case for name, case in rings.items() if case.world_size == fitted(case).world_size}
    cases |= {f"fault-{number}": case_of(limit, 2) for number, limit in enumerate((LOW_LATENCY, BULK))}
    found: dict[Hashable, Task] = {}
    for named, gives_ids in ((cases.values(), True), (soaked_sizes().values(), False)):
        for case in named:
            for number, variant in enumerate(variants_of(case, gives_ids)):
                found.setdefault(variant.key, Task(case, gives_ids, number))
    return list(found.values())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    start, num_processes = time.monotonic(), min(MAX_PROCESSES, os.cpu_count() or 1)
    PROCESSES.set_forkserver_preload([__spec__.name])
    with PROCESSES.Pool(num_processes, keep_to_one_core, (PROCESSES.Value("i", 0),)) as pool:
        tasks = find_tasks()
        sys.stdout.write(f"{len(tasks)} variants, {num_processes} processes, after {time.monotonic() - start:.0f} s\n")
        sys.stdout.flush()
        spent = sum(pool.imap_unordered(compile_task, tasks, chunksize=1))
    sys.stdout.write(f"all compiled after {time.monotonic() - start:.0f} s, {spent:.0f} s of cores\n")


if __name__ == "__main__":
    main()
