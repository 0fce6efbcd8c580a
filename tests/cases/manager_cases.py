"""Bodies of the manager tests: run on every rank, on CPU (tests/multiprocess) and on GPUs (tests/multigpu) alike."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_a2a import errors
from ep_a2a.managers.registry import create_manager
from ep_a2a.ops.collective import CollectiveDispatchCombineOp
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, make_inputs, run_step, run_steps

COLLECTIVE = ("naive", "allgather_reducescatter")
BACKENDS = ("ep_a2a", *COLLECTIVE)
HIDDEN_DIM, TOPK, NUM_EXPERTS = 32, 3, 12


def create(name: str, context: RankContext) -> Any:
    manager = create_manager(name, context.group)
    manager.device = context.device
    return manager


def other_forms(context: RankContext, name: str) -> None:
    """Router logits, AITER's two-tensor form, no extra tensors, combine_into_output, non-contiguous tensors."""
    manager = create(name, context)
    counts = (3, 0, 2, 4)
    num_rows, num_tokens = sum(counts[: context.world_size]), counts[context.rank]
    generator, start = torch.Generator().manual_seed(0), sum(counts[: context.rank])
    both = [torch.rand(num_rows, width, generator=generator).to(context.device) for width in (HIDDEN_DIM, NUM_EXPERTS)]
    hidden, logits = (each[start : start + num_tokens] for each in both)
    weights, flags = logits[:, :TOPK], logits[:, 0] > 0.5
    ids = torch.zeros(num_tokens, TOPK, dtype=torch.int64, device=context.device)
    rows = torch.ones(num_rows, HIDDEN_DIM, device=context.device)
    assert manager.allocate_combine_input(rows.shape, rows.dtype, context.device) is None, "any memory is as good"
    forms: list[Callable[[], Any]] = [
        lambda: manager.dispatch_router_logits(hidden, logits),
        lambda: manager.dispatch_router_logits(hidden, logits, True, extra_tensors=[flags])[:2],
        lambda: manager.dispatch(hidden, logits),
        lambda: manager.dispatch(hidden, logits, True),
        lambda: manager.dispatch(hidden, logits, is_sequence_parallel=True),
        lambda: manager.dispatch(hidden.T.contiguous().T, logits),
    ]
    for form in forms:
        got = form()
        assert len(got) == 2
        assert all(torch.equal(mine, other) for mine, other in zip(got, both))
        output = torch.empty(counts[context.rank], HIDDEN_DIM, dtype=torch.float16, device=context.device)
        assert manager.combine_into_output(rows, output) is output
        assert torch.equal(output, torch.full_like(output, context.world_size))
    assert len(manager.dispatch(hidden, weights, ids)) == 3
    with pytest.raises(errors.ShapeError):
        manager.combine(rows[:-1])
    with pytest.raises(errors.ShapeError):
        manager.combine_into_output(rows, torch.empty(1, 1))
    manager.combine(rows)
    with pytest.raises(errors.ShapeError):
        manager.dispatch(hidden, weights[:0] if len(weights) else weights.new_zeros(1, TOPK), ids)
    manager.destroy()


def run_case_on(context: RankContext, name: str, case: Case) -> None:
    """Every step of an op case on a collective op, against the oracle."""
    manager = create(name, context)
    op: Any = CollectiveDispatchCombineOp(case.config(context.rank), manager._exchange(60.0), context.device)
    run_steps(case, op, context.device)
    manager.destroy()


def kwargs_of(case: Case, rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank,
        "num_ep_ranks": case.world_size,
        "input_dtype": case.dtype,
        "quant_dtype": case.dtype,
        "token_hidden_size": case.hidden_dim,
        "max_num_tokens_per_dp_rank": case.max_tokens,
        "num_local_experts": case.num_experts // case.world_size,
        "num_experts_per_token": case.topk,
        "layout": case.layout,
        **changes,
    }


def ranks_that_disagree(context: RankContext, name: str) -> None:
    """What differs between ranks is an error on all of them, and the next step works."""
    manager = create(name, context)
    case = Case(world_size=context.world_size, num_experts=2 * context.world_size, tokens=((4, 2),))
    tokens = torch.zeros(2, 16 + context.rank, device=context.device)
    with pytest.raises(errors.ConfigMismatchError, match=r"others on ranks \["):
        manager.dispatch_router_logits(tokens, torch.zeros(2, 4, device=context.device))
    with pytest.raises(errors.ConfigMismatchError, match=rf"tag {context.rank} on all ranks.*others on ranks \["):
        manager.dispatch_router_logits(tokens[:, :16], tokens[:, :4], tag=context.rank)
    with pytest.raises(errors.ConfigMismatchError, match="hidden_dim to be the same on all ranks"):
        manager.get_handle(kwargs_of(case, context.rank, token_hidden_size=64 + 8 * (context.rank % 2)))
    op = manager.get_handle(kwargs_of(case, context.rank))
    arguments = make_inputs(case, 0, context.rank).on(context.device)
    with pytest.raises(errors.ConfigMismatchError, match="rank 1: step_tokens 5"):
        op.dispatch(*arguments, step_tokens=4 + context.rank)
    with pytest.raises(errors.ConfigMismatchError, match="rank 0: tag 7, rank 1: tag 8"):
        op.dispatch(*arguments, tag=7 + context.rank)
    weights = arguments[1] if context.rank else None
    with pytest.raises(errors.ConfigMismatchError, match="rank 0: step_tokens 16 with no weights"):
        op.dispatch(arguments[0], weights, None, arguments[3])
    run_step(case, op, 0, context.device)
    manager.destroy()


def wrong_use(context: RankContext, name: str) -> None:
    """Errors that leave the op usable."""
    manager = create(name, context)
    case = Case(world_size=context.world_size, num_experts=2 * context.world_size, tokens=((4, 2),))
    op = manager.get_handle(kwargs_of(case, context.rank))
    tokens, weights, _, ids = make_inputs(case, 0, context.rank).on(context.device)
    with pytest.raises(errors.AlternationError):
        op.combine(tokens, None, None)
    with pytest.raises(errors.TooManyTokensError):
        op.dispatch(tokens, weights, None, ids, step_tokens=1)
    got = op.dispatch(tokens, weights, None, ids)
    with pytest.raises(errors.AlternationError):
        op.dispatch(tokens, weights, None, ids)
    rows = torch.zeros_like(got[0])
    with pytest.raises(errors.ForeignIndicesError):
        op.combine(rows, None, ids + 1)
    op.combine(rows, None, ids)
    op.dispatch(tokens, weights, None, ids)
    op.reset()
    run_step(case, op, 0, context.device)
    _wrong_halves(op, tokens, ids)
    run_step(case, op, 0, context.device)

    cap = context.world_size
    small = manager.get_handle(kwargs_of(case, context.rank, max_total_recv_tokens=cap))
    to_rank_0 = torch.zeros_like(ids)
    with pytest.raises(errors.CapacityError, match=f"at most {cap} received rows.*on rank 0"):
        small.dispatch(tokens, weights, None, to_rank_0)
    with pytest.raises(errors.UnsupportedError, match="expert_major"):
        manager.get_handle(kwargs_of(case, context.rank, layout="expert_major"))
    manager.destroy()


def _wrong_halves(op: Any, tokens: torch.Tensor, ids: torch.Tensor) -> None:
    with pytest.raises(errors.AlternationError):
        op.dispatch_recv()
    op.dispatch_send(tokens, None, None, ids)
    for call in (op.combine_recv, lambda: op.dispatch(tokens, None, None, ids), lambda: op.combine(tokens, None, None)):
        with pytest.raises(errors.AlternationError):
            call()
    got = op.dispatch_recv()
    assert op.has_open_step
    with pytest.raises(errors.ForeignIndicesError):
        op.combine_send(torch.zeros_like(got[0]), None, ids + 1)
    op.combine_send(torch.zeros_like(got[0]), None, ids)
    op.reset()
    assert not op.has_open_step
    with pytest.raises(errors.AlternationError):
        op.combine_recv()


def capture_is_refused(context: RankContext, name: str) -> None:
    """Token counts would be frozen in a CUDA graph, so it must not get one."""
    manager = create(name, context)
    tokens = torch.zeros(2, 16, device=context.device)
    stream = torch.cuda.Stream(context.device)
    with (
        pytest.raises(errors.UnsupportedError, match="capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        manager.dispatch(tokens, tokens)
    manager.destroy()


def absent_rank(context: RankContext, name: str) -> None:
    """A rank that does not come is an error after the op's timeout."""
    manager = create(name, context)
    case = Case(world_size=context.world_size, num_experts=2 * context.world_size)
    op = manager.get_handle(kwargs_of(case, context.rank, timeout_secs=60))
    op.set_timeout(0.5)
    x, _, _, ids = make_inputs(case, 0, context.rank).on(context.device)
    if context.rank == 0:
        with pytest.raises(errors.RankTimeoutError, match=r"within 0.5 s.*rank 0 waited") as caught:
            op.dispatch(x, None, None, ids)
        others = tuple(range(1, context.world_size))
        assert (caught.value.missing_ranks, caught.value.late_ranks) == ((), others)


def killed_rank(context: RankContext, name: str, folder: str) -> None:
    """The last rank is killed between two steps; each of the others writes down whom its error names."""
    manager = create(name, context)
    case = Case(world_size=context.world_size, num_experts=2 * context.world_size)
    op = manager.get_handle(kwargs_of(case, context.rank, timeout_secs=5))
    run_step(case, op, 0, context.device)
    if context.rank == context.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.RankTimeoutError) as caught:
        run_step(case, op, 1, context.device)
    names = caught.value.missing_ranks, caught.value.late_ranks
    Path(folder, f"{context.rank}.json").write_text(json.dumps(names))
