"""Captures and replays an op's steps: a CUDA graph on GPUs; on CPU the same launches, without the op's Python."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from ep_a2a.memory.guards import recording_on_cpu
from ep_a2a.ops.arguments import Step
from ep_a2a.ops.op import EpDispatchCombineOp

LAUNCHES = ("dispatch", "combine", "count_local_experts")


class _Recorder:
    """Stands in for an op's kernels: runs every launch and remembers it."""

    def __init__(self, kernels: Any, calls: list[Callable[[], Any]]) -> None:
        self._kernels, self._calls = kernels, calls

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kernels, name)
        if name not in LAUNCHES:
            return method

        def run(*args: Any, **options: Any) -> None:
            # an op forgets the tensors of a step whose dispatch has been launched
            kept = [copy.copy(each) if isinstance(each, Step) else each for each in args]
            self._calls.append(lambda: method(*kept, **options))
            method(*args, **options)

        return run


class CapturedStep:
    """The launches of `body`, ready to be replayed; each replay reads its inputs again.

    A CUDA capture runs nothing; on CPU the capture is itself a run, so that its outputs can be looked at. On both,
    memory that is first needed inside is an error.

    Args:
        op: the op that `body` calls.
        body: calls dispatch, `call(experts)` and combine. What is computed outside of `call` is not replayed on CPU.
    """

    def __init__(self, op: EpDispatchCombineOp, body: Callable[[Callable[[Callable[[], None]], None]], None]) -> None:
        self.device = op.arena.device
        self.ran_at_capture = self.device.type == "cpu"
        if self.device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                body(lambda work: work())
            return
        self._calls: list[Callable[[], Any]] = []
        engine: Any = op.engine
        op.engine = _Recorder(engine, self._calls)  # type: ignore[assignment]
        try:
            with recording_on_cpu():
                body(self._call)
        finally:
            op.engine = engine

    def _call(self, work: Callable[[], None]) -> None:
        self._calls.append(work)
        work()

    def replay(self) -> None:
        """Runs the launches again."""
        if self.device.type == "cuda":
            self._graph.replay()
        else:
            for call in self._calls:
                call()
