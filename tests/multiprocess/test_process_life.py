"""What a process may do with an op: a forked child may not use it, and Ctrl-C leaves what is told to others."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import ep_a2a
from ep_a2a.errors import ConfigMismatchError, ForkedProcessError
from ep_a2a.kernels.portable import PortableFunction
from ep_a2a.memory.arena import Arena
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, built_op, make_inputs, make_op, run_step
from tests.cases.op_checks import ENOUGH_SECS, raised

CASE = Case(world_size=2, tokens=((4, 3),), hidden_dim=32)


def as_forked_child(work: Callable[[], object]) -> int:
    """The exit code of a forked child that does `work`: 0 if that returned."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001  nothing of the parent's may run on in the child
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_in_a_step(context: RankContext, case: Case) -> Any:
    with built_op(context, case) as op:
        run_step(case, op, 0, context.device)
        step = Step.dispatch(case, op, 1, context.device)
        rows = op.get_registered_combine_input_buffer(op.config.combined_dtype)

        def misuse() -> None:
            for call in (
                lambda: op.combine(rows, None, None),
                lambda: op.combine_send(rows),
                op.reset,
                lambda: make_op(context, case, op.arena),
                lambda: ep_a2a.make_op(context.group, hidden_size=32, num_experts=2, topk=2, max_tokens=4),
                lambda: op.arena.rendezvous.barrier("of the child"),
            ):
                raised(ForkedProcessError, call, f"process {os.getppid()}, which made it", "spawn")
            op.close()
            op.arena.close()

        code = as_forked_child(misuse)
        step.check_dispatched()
        step.combine()
        run_step(case, op, 2, context.device)
        return code


def test_a_forked_child_may_not_call(ranks):
    assert ranks(fork_in_a_step, CASE.world_size, CASE) == [0, 0]


@contextlib.contextmanager
def interrupting(function: str) -> Iterator[None]:
    """Makes Ctrl-C come where a kernel has just called a device function."""
    run = PortableFunction.__call__

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        if self.__name__ == function:
            raise KeyboardInterrupt
        return result

    PortableFunction.__call__ = interrupted  # type: ignore[method-assign]
    try:
        yield
    finally:
        PortableFunction.__call__ = run  # type: ignore[method-assign]


def disagree_before_the_flags(context: RankContext, case: Case) -> None:
    """Rank 0 has told how many rows it sends, and of its other number of step tokens, but never raises its flag."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena, timeout_secs=ENOUGH_SECS, flagged_max_tokens=0)

        def step(step_tokens: int) -> None:
            mine = make_inputs(case, 0, context.rank)
            op.dispatch(mine.tokens, mine.weights, None, mine.ids, step_tokens=step_tokens)
            op.check()

        if context.rank:
            raised(ConfigMismatchError, lambda: step(4), "step_tokens")
        else:
            with pytest.raises(KeyboardInterrupt), interrupting("post_counts"):
                step(3)
        op.reset()


def test_a_disagreement_is_seen_before_the_flags(ranks):
    ranks(disagree_before_the_flags, CASE.world_size, replace(CASE, layout="rank_major", tokens=((3, 3),)))
