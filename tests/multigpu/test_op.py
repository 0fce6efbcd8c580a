"""The op on GPUs: the same cases and bodies as on CPU processes."""

from typing import Any

import pytest
import torch

from ep_a2a.memory.arena import Arena, allocate_symmetric
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing import RankContext, run_ranks
from tests.cases.op_cases import Case, built_op, make_op, run_case, run_step
from tests.cases.op_special import missing_rank
from tests.markers import needs_own_gpus
from tests.multigpu.cases import fitted, op_cases, special_cases


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in op_cases()])
def test_op(ranks: Any, case: Case) -> None:
    ranks(run_case, case.world_size, case)


@pytest.mark.usefixtures("compiled_whole")
@pytest.mark.parametrize("name", special_cases())
def test_special(ranks: Any, name: str) -> None:
    body, case = special_cases()[name]
    ranks(body, case.world_size, case)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("layout", ["compact", "rank_major"])
@pytest.mark.parametrize("flagged_max_tokens", [0, 128])
def test_missing_rank(ranks: Any, phase: str, layout: str, flagged_max_tokens: int) -> None:
    options = {"flagged_max_tokens": flagged_max_tokens}
    case = Case(world_size=3, num_experts=6, layout=layout, with_weights=False, combine_weights=False, options=options)
    case = fitted(case)
    ranks(missing_rank, case.world_size, case, phase)


def one_visible_gpu(context: RankContext, case: Case) -> str:
    """Every rank sees one GPU and calls it cuda:0, as under Ray."""
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] = str(context.rank)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    local = RankContext(context.rank, context.world_size, device, context.group)
    memory = allocate_symmetric(Rendezvous(context.group), device, 4096)
    kind = memory.kind
    memory.close()
    memory.close()
    with Arena(context.group, device) as arena:
        op = make_op(local, case, arena)
        for number in range(3):
            run_step(case, op, number, device)
    return kind


@needs_own_gpus(2, "a rank that sees one GPU")
def test_ranks_that_all_see_cuda_0() -> None:
    case = fitted(Case(world_size=4))
    assert set(run_ranks(one_visible_gpu, case.world_size, case, device="cpu")) == {"CUDA IPC"}


def memory_in_a_pool(context: RankContext, case: Case) -> list[str]:
    """What an op keeps in the pool that was in use while it was built."""
    pool = torch.cuda.MemPool()
    with Arena(context.group, context.device) as arena:
        with torch.cuda.use_mem_pool(pool, context.device):
            op = make_op(context, case, arena)
        spans = [(s["address"], s["address"] + s["total_size"]) for s in torch.cuda.memory_snapshot(pool.id)]
        memory = op.memory.acquired
        tensors = {"table": op.memory.table, "own": memory.local_own} | memory.local_shared
        tensors |= {name: block.local for name, block in memory.symmetric.items()}
        run_step(case, op, 0, context.device)
        return [
            name for name, tensor in tensors.items() if any(start <= tensor.data_ptr() < end for start, end in spans)
        ]


@pytest.mark.parametrize("layout", ["rank_major", "expert_major"])
def test_nothing_lies_in_a_pool_that_an_engine_may_unmap(ranks: Any, layout: str) -> None:
    """vLLM's sleep mode discards what was allocated while weights were loaded, where it also builds ops."""
    case = fitted(Case(layout=layout, combine_weights=False))
    assert not any(ranks(memory_in_a_pool, case.world_size, case))


def no_compile_after_construction(context: RankContext, case: Case) -> int:
    import triton

    with built_op(context, case) as op:
        compiled: list[str] = []
        triton.knobs.runtime.jit_post_compile_hook = lambda *_, fn, **__: compiled.append(str(fn))
        try:
            for number in range(len(case.tokens)):
                run_step(case, op, number, context.device)
        finally:
            triton.knobs.runtime.jit_post_compile_hook = None
        return len(compiled)


@pytest.mark.usefixtures("compiled_whole")
def test_nothing_is_compiled_after_construction(ranks: Any) -> None:
    sizes = tuple((t,) for t in (0, 1, 15, 16, 17, 4096))
    case = fitted(Case(tokens=sizes, max_tokens=4096, layout="rank_major"))
    assert sum(ranks(no_compile_after_construction, case.world_size, case)) == 0
