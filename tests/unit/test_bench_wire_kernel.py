"""The limit's kernel as a GPU would run it: a limit that moved narrow words one after another would be none."""

from __future__ import annotations

import re

import pytest
import torch

from ep_a2a.bench.wire_kernels import push_kernel
from ep_a2a.bench.wire_limit import GPU_LAUNCHES, LOADS_IN_FLIGHT, WARP_THREADS, push_constants
from ep_a2a.testing.offline_compile import compile_offline


@pytest.mark.parametrize(("world_size", "num_threads"), [(2, 256), (4, 512), (8, 256)])
def test_eight_wide_loads_come_before_the_first_store(world_size, num_threads):
    assert num_threads in {threads for _, threads in GPU_LAUNCHES}
    words, longs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    args = (words, longs, longs, longs, words, 0, 1)
    ptx = compile_offline(push_kernel, args, push_constants(world_size, num_threads), num_threads // WARP_THREADS)[
        "ptx"
    ]
    accesses = re.findall(r"\b(ld|st)\.global\S*\.v4\.b32", ptx)
    assert accesses == ["ld"] * LOADS_IN_FLIGHT + ["st"] * LOADS_IN_FLIGHT
    # one arrival, one vector of flags, one look and the loop's
    atomics = re.findall(r"\batom\.\S+", ptx)
    assert [sum(kind in atomic for atomic in atomics) for kind in ("acq_rel.add", "release.exch", "acquire.add")] == [
        1, 1, 2,
    ]  # fmt: skip
