"""Bodies of op tests about casts that come before dispatch, and another default device."""

from dataclasses import replace

import torch

from ep_a2a import errors
from ep_a2a.config import FP8_DTYPE
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, arena_of, built_op, make_inputs, make_op, read_bodies, run_step
from tests.cases.op_checks import raised, synchronize


def cast_by_some_ranks(context: RankContext, case: Case) -> None:
    """Tokens that come cast may hold any byte, those that dispatch casts may not: ranks must agree on who casts."""
    with built_op(context, case) as op:
        num_scales = op.config.num_scales
        cast = replace(case, dtype=FP8_DTYPE, scale_dim=num_scales, quant_type="none", options={})
        for number in range(3):
            step = Step.dispatch(cast, op, number, context.device)
            step.check_dispatched()
            step.combine()
            run_step(case, op, number, context.device)
        op.dispatch(*make_inputs(cast if context.rank == 0 else case, 3, context.rank).on(context.device))
        synchronize(context)
        op.arena.rendezvous.barrier("mismatch seen")
        raised(errors.ConfigMismatchError, op.check, "rank 0")
        op.reset()
        for number in range(3):
            run_step(case, op, number, context.device)


def cast_before(context: RankContext, case: Case) -> None:
    """Tokens come cast, in a config that could cast them: a rank without tokens moves other ranks' scales, too."""
    with built_op(context, case) as op:
        cast = replace(case, dtype=FP8_DTYPE, scale_dim=op.config.num_scales, quant_type="none", options={})
        for number in range(case.num_steps):
            step = Step.dispatch(cast, op, number, context.device)
            step.check_dispatched()
            step.combine()


def built_under_another_default_device(context: RankContext, case: Case) -> None:
    """As engines do that build layers under "meta"."""
    with arena_of(context, case) as arena:
        with torch.device("meta"):
            op = make_op(context, case, arena)
        for number in range(case.num_steps):
            run_step(case, op, number, context.device)


STEP_BODIES = read_bodies("op_steps", globals())
