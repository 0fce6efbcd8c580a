"""The kernels that a case launches, which are far fewer than an op compiles when it is built."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.ops.arguments import NO_WISH, RECEIVE, SEND, WHOLE, Stages
from ep_a2a.ops.bounds import Bounds
from ep_a2a.ops.engine import Engine
from ep_a2a.ops.launches import CombineForm, DispatchForm, KernelLaunch
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case


def compiled_when_used(context: RankContext, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a body whose ops compile what they launch, when they first do."""
    with mock.patch.object(Engine, "compile", return_value=None):
        return body(context, *args, **kwargs)


def used_by(engine: Any, case: Case, *, gives_ids: bool = True) -> list[CompiledKernel]:
    """The kernels of all launches of a case's steps, on any rank; nothing is compiled.

    gives_ids: whether combine is given this rank's ids.
    """
    steps = ((step, rank) for step in range(case.num_steps) for rank in range(case.world_size))
    found = [
        launch.kernel for step, rank in steps for launch in _of_step(engine, case, step, rank, gives_ids=gives_ids)
    ]
    return list({id(kernel): kernel for kernel in found}.values())


def _of_step(engine: Any, case: Case, step: int, rank: int, *, gives_ids: bool) -> Iterator[KernelLaunch]:
    bounds = Bounds.of(case.config(rank), case.stride(step) or case.max_tokens)
    sizes = case.num_tokens(step, rank), bounds
    dispatch = DispatchForm(case.dtype, case.scale_dim > 0, case.with_weights, *sizes)
    has_weights = case.combine_weights and case.with_weights and case.layout != "expert_major"
    has_biases = (case.num_biases > rank % 2, case.num_biases > 1 - rank % 2)
    for stages in _stages(case, step, rank, "dispatch"):
        yield from engine._whole_dispatch(dispatch, stages, NO_WISH)
    for stages in _stages(case, step, rank, "combine"):
        yield from engine._whole_combine(CombineForm(has_weights, gives_ids, has_biases, *sizes), stages, NO_WISH)


def _stages(case: Case, step: int, rank: int, phase: str) -> tuple[Stages, ...]:
    return (SEND, RECEIVE) if case.in_halves(step, rank, phase) else (WHOLE,)
