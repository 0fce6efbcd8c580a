"""Fills Triton's disk cache for the multi-GPU tests with all cores at once: python -m tests.multigpu.precompile.

Not needed for the tests to pass; on a rented machine it turns minutes of compiling into seconds.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import TYPE_CHECKING

import torch

from ep_a2a.ops.intra_node import IntraNodeKernels
from ep_a2a.ops.rings import InterNodeKernels
from tests.cases.outside_fault_cases import DIRECT, FLAGGED, case_of
from tests.multigpu.cases import op_cases, ring_cases, special_cases

if TYPE_CHECKING:
    from tests.cases.op_cases import Case


def compile_case(case: Case) -> None:
    device = torch.device("cuda", 0)
    config = case.config(0)
    engine = InterNodeKernels if config.uses_rings else IntraNodeKernels
    kernels = engine(config, torch.zeros(64, case.world_size, dtype=torch.int64, device=device), device)
    kernels.compile()
    if case.split:
        kernels.warmup_split()


def main() -> None:
    cases = {repr(case.config(0)): case for _, case in op_cases()}
    cases |= {repr(case.config(0)): case for _, case in special_cases().values()}
    cases |= {repr(case.config(0)): case for case in ring_cases()}
    cases |= {repr(case.config(0)): case for case in (case_of(FLAGGED, 2), case_of(DIRECT, 2))}
    with multiprocessing.get_context("spawn").Pool(min(48, os.cpu_count() or 1)) as pool:
        pool.map(compile_case, cases.values(), chunksize=1)


if __name__ == "__main__":
    main()
