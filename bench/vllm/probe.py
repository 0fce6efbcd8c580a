"""Measures inside the worker of a vLLM engine; `watch` and `fetch` travel to it by `LLM.collective_rpc`.

Engines of one model go from step to step together, so what a rank does in its n-th step all ranks do at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from bench.vllm.report import Kernel, profile

WARM_STEPS = 8
"""Before a graph is replayed."""
WARM_REPLAYS = 5
REPEATS = 5


class Probe:
    """Stands between an engine and its worker's `execute_model` until its result is fetched.

    With `num_replays` it replays the CUDA graph of the WARM_STEPS-th step with `num_tokens` tokens, whichever of vLLM's
    model runners captured it, and profiles the `num_steps` steps behind. Without, it profiles the first such step.

    Args:
        worker: of vLLM.
        num_tokens: of this rank, in the steps that are measured.
        num_layers: MoE layers of the model.
    """

    def __init__(self, worker: Any, num_tokens: int, num_layers: int, num_replays: int = 0, num_steps: int = 1) -> None:
        self.result: dict[str, Any] = {"us": [], "profile": {}}
        self._original: Callable[..., Any] = worker.execute_model
        self._worker, self._num_tokens, self._num_layers = worker, num_tokens, num_layers
        self._num_replays, self._num_steps, self._count = num_replays, num_steps, 0
        self._profiler: Any = None
        worker.execute_model = self.execute_model

    def remove(self) -> dict[str, Any]:
        """Leaves the worker as it was; returns what was measured."""
        self._worker.execute_model = self._original
        return self.result

    def execute_model(self, scheduled: Any, *more: Any, **named: Any) -> Any:
        """Runs a step of the engine, and measures."""
        run = partial(self._original, scheduled, *more, **named)
        if scheduled.total_num_scheduled_tokens != self._num_tokens:
            return run()
        self._count += 1
        return self._decode(run) if self._num_replays else self._prefill(run)

    def _decode(self, run: Callable[[], Any]) -> Any:
        if self._profiler and self._count == WARM_STEPS + self._num_steps:
            self._stop_profile()
        result, graph = _with_graph(run)
        if graph is not None and self._count == WARM_STEPS:
            self.result["us"] = [self._replay_us(graph) for _ in range(REPEATS)]
            self._start_profile()
        return result

    def _prefill(self, run: Callable[[], Any]) -> Any:
        if self._count == 1:
            self._start_profile()
        result = run()
        if self._count == 1:
            self._stop_profile()
        return result

    def _replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        barrier()
        for number in range(WARM_REPLAYS + self._num_replays):
            if number == WARM_REPLAYS:
                start.record()
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self._num_replays

    def _start_profile(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()
        barrier()

    def _stop_profile(self) -> None:
        torch.cuda.synchronize()
        self._profiler.stop()
        kernels = [
            Kernel(event.name, event.time_range.start, event.time_range.end)
            for event in self._profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        self.result["profile"] = profile(kernels, self._num_steps, self._num_layers)
        self._profiler = None


def _with_graph(run: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph | None]:
    """Runs a step; its result and its CUDA graph, or None where it is not one graph."""
    graphs: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        graphs.append(graph)
        replay(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", noted):
        result = run()
    return result, graphs[0] if len(graphs) == 1 else None


_active: list[Probe] = []


def barrier() -> None:
    """Waits for the GPU, and for the other ranks' workers."""
    from vllm.distributed.parallel_state import get_ep_group

    torch.cuda.synchronize()
    get_ep_group().barrier()


def watch(worker: Any, *numbers: int) -> None:
    """Makes a worker measure steps that come; `numbers` are a Probe's."""
    _active.append(Probe(getattr(worker, "worker", worker), *numbers))


def fetch(_: Any) -> dict[str, Any]:
    """What the worker has measured since `watch`."""
    return _active.pop().remove()
