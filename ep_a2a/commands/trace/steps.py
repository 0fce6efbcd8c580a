"""Runs the op with its kernels' spans recorded, on every rank of `ep-a2a trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.commands.bench.native import OpContender, OpSession
from ep_a2a.telemetry.profiler import StepProfiler

if TYPE_CHECKING:
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.telemetry.spans import TraceSpan
    from ep_a2a.testing.worker import RankContext


def trace_steps(context: RankContext, workload: Workload, num_steps: int) -> list[TraceSpan]:
    """Runs steps with identity experts and returns this rank's spans of the latest ones. Collective.

    One checked step runs before them and compiles the kernels.

    Args:
        num_steps: steps; of more than SPAN_STEPS the latest are returned.

    Raises:
        CheckFailedError: dispatch and combine do not give the right result.
    """
    with OpSession(workload, context, OpContender()) as session:
        profiler = StepProfiler(session.op)
        session.check()
        profiler.clear()
        for _ in range(num_steps):
            with profiler.call("dispatch"):
                dispatched = session.dispatch()
            with profiler.call("combine"):
                session.combine(dispatched)
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        session.check_timed()
        return profiler.spans()
