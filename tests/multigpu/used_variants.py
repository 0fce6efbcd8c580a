"""The kernels that a case launches, which are far fewer than an op compiles when it is built."""

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.ops.arguments import NO_WISH, RECEIVE, SEND, WHOLE, CombineArguments, Stages, Step
from ep_a2a.ops.engine import Engine
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case

Variants = list[tuple[CompiledKernel, tuple[Any, ...]]]


def compiled_when_used(context: RankContext, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a body whose ops compile what they launch, when they first do."""
    with mock.patch.object(Engine, "compile", return_value=None):
        return body(context, *args, **kwargs)


def used_by(engine: Any, case: Case, *, gives_ids: bool = True) -> Variants:
    """(kernel, run-time arguments) of all launches of a case's steps, on any rank; nothing is compiled.

    gives_ids: whether combine is given this rank's ids.
    """
    recorded: Variants = []
    with mock.patch.object(CompiledKernel, "compile", lambda kernel, args: recorded.append((kernel, args))):
        for step, rank in ((step, rank) for step in range(case.num_steps) for rank in range(case.world_size)):
            recorded += _of_step(engine, case, step, rank, gives_ids=gives_ids)
        if case.layout == "expert_major":
            # launched beside dispatch and combine
            recorded += [
                each for each in engine.compiled_kernels() if re.search("expert|expand", each[0].kernel.__name__)
            ]
    return list({id(kernel): (kernel, values) for kernel, values in recorded}.values())


def _of_step(engine: Any, case: Case, step: int, rank: int, *, gives_ids: bool) -> Iterator[Any]:
    config, device = engine.kernels.config, engine.kernels.device
    word, floats = (torch.empty(16, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    x, rows = (torch.empty(16, dtype=dtype, device=device) for dtype in (case.dtype, config.combined_dtype))
    num_tokens, stride = case.num_tokens(step, rank), case.stride(step) or case.max_tokens
    by_expert = case.layout == "expert_major"
    scales = word if case.scale_dim else None
    sent_weights = floats if case.with_weights else None
    dispatch = Step(x, sent_weights, scales, word, stride, case.pad_id, num_tokens=num_tokens)
    weights = floats if case.combine_weights and case.with_weights and not by_expert else None
    biases: list[torch.Tensor | None] = [None, None]
    for place in (1, 0)[: case.num_biases] if rank % 2 else (0, 1)[: case.num_biases]:
        biases[place] = rows
    combine = CombineArguments(rows, weights, word if gives_ids else None, rows, biases, num_tokens, stride)
    for stages in _stages(case, step, rank, "dispatch"):
        yield from (launch[:2] for launch in engine._dispatch_launches(dispatch, stages, NO_WISH))
    for stages in _stages(case, step, rank, "combine"):
        yield from (launch[:2] for launch in engine._combine_launches(combine, stages, NO_WISH))


def _stages(case: Case, step: int, rank: int, phase: str) -> tuple[Stages, ...]:
    return (SEND, RECEIVE) if case.in_halves(step, rank, phase) else (WHOLE,)
