"""vLLM's released scheduler of micro-batches (dual batch overlap) on CPU: its threads and its code, on stub streams.

A stub stream knows which work has ended before what is launched on it next. So each piece of work can be asked whether
it waits for what it reads.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ep_a2a.memory.guards import recording_on_cpu
from tests.engines.vllm.contract.layer_cases import Layer, kernel_of, run_kernel

NUM_SMS = 132
COMPUTE, COMM = "compute", "comm"
EXCHANGES = ("dispatch", "combine")
"""Work on the communication stream: memory that it reads may go to other work on the compute stream."""


class Stream:
    """A stream by name, and the work that what follows on it waits for.

    Attributes:
        read: what a piece of work reads, until this stream waits for it; freed: work whose input was freed before that.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.before: set[tuple[Any, ...]] = set()
        self.read: dict[tuple[Any, ...], weakref.ref[torch.Tensor]] = {}
        self.freed: list[tuple[Any, ...]] = []

    def wait_event(self, event: Event) -> None:
        waited = {work: self.read.pop(work) for work in event.before & self.read.keys()}
        self.freed += [work for work, tensor in waited.items() if tensor() is None]
        self.before |= event.before


class Event:
    """The work before it, on the stream that has recorded it."""

    def __init__(self) -> None:
        self.before: set[tuple[Any, ...]] = set()

    def record(self, stream: Stream) -> None:
        self.before = set(stream.before)


class Device:
    """The current stream of each thread, and what was launched.

    Attributes:
        works: each piece of work as (kind, micro-batch, layer), with the name of its stream, in order.
        late: work that was launched without a wait for work that it needs.
        new_streams: what a runner gets that makes streams: the one for communication, and that of captures.
    """

    def __init__(self) -> None:
        self.compute, self.comm = Stream(COMPUTE), Stream(COMM)
        self.works: list[tuple[tuple[Any, ...], str]] = []
        self.late: list[tuple[Any, ...]] = []
        self.new_streams = itertools.cycle([self.comm])
        self._local = threading.local()

    @property
    def stream(self) -> Stream:
        found: Stream = getattr(self._local, "stream", self.compute)
        return found

    def set_stream(self, stream: Stream) -> None:
        self._local.stream = stream

    @contextlib.contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before = self.stream
        self.set_stream(stream)
        yield
        self.set_stream(before)

    def begin_step(self) -> None:
        self.works.clear()
        self.compute.before, self.comm.before = set(), set()
        self.compute.read.clear()

    def launch(self, work: tuple[Any, ...], needed: tuple[Any, ...] | None) -> None:
        if needed is not None and needed not in self.stream.before:
            self.late.append(work)
        self.works.append((work, self.stream.name))
        self.stream.before.add(work)


@contextlib.contextmanager
def on_stub_streams(manager: Any) -> Iterator[Device]:
    """Within, vLLM's threads work on stub streams of a GPU that has NUM_SMS multiprocessors."""
    from vllm.v1.worker import gpu_ubatch_wrapper, ubatching

    from ep_a2a.integrations.vllm.micro_batches import patch_micro_batches

    patch_micro_batches()
    device = Device()
    group = SimpleNamespace(device_communicator=SimpleNamespace(all2all_manager=manager))
    # up to 0.29 the wrapper's own, then a module's that both runners use
    limits = getattr(gpu_ubatch_wrapper, "create_sm_control_context", gpu_ubatch_wrapper.UBatchWrapper)
    modules = [ubatching, importlib.import_module("vllm.v1.worker.ubatch_utils"), sys.modules[limits.__module__]]
    with contextlib.suppress(ImportError):
        modules.append(importlib.import_module("vllm.v1.worker.gpu.ubatch_utils"))
    stubs = {
        "current_stream": lambda: device.stream,
        "current_platform": SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False, graph_pool_handle=tuple),
        "num_compute_units": lambda _: NUM_SMS,
        "has_deep_gemm": lambda: False,
        "get_ep_group": lambda: group,
        "set_graph_pool_id": lambda _: None,
        "get_offloader": mock.MagicMock(),
    }
    with contextlib.ExitStack() as stack:
        for module in {id(each): each for each in (*modules, gpu_ubatch_wrapper)}.values():
            for name in stubs.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, stubs[name]))
        for owner, name, stub in (
            (torch.cuda, "Stream", lambda **_: next(device.new_streams)),
            (torch.cuda, "set_stream", device.set_stream),
            (torch.cuda, "stream", device.within),
            (torch.cuda, "current_stream", lambda *_: device.stream),
            (torch.cuda, "current_blas_handle", lambda: 0),
            (torch.cuda, "CUDAGraph", mock.MagicMock),
            (torch.cuda, "graph", lambda *_, **__: recording_on_cpu()),
            (torch.accelerator, "set_device_index", lambda _: None),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch, "Event", Event),
        ):
            stack.enter_context(mock.patch.object(owner, name, stub))
        yield device


class Model:
    """A model whose layers are MoE layers; each gets the same rows of its own inputs.

    Attributes:
        bounds: the bound on multiprocessors at each dispatch, 0 = none.
        failing: (micro-batch, layer) before whose dispatch the model raises `error`.
    """

    def __init__(self, cases: list[Layer], manager: Any, device: Device, sp_size: int = 1) -> None:
        self.cases, self.device, self.manager, self.sp_size = cases, device, manager, sp_size
        self.kernels = [kernel_of(case, manager, sp_size) for case in cases]
        self.bounds: list[int] = []
        self.failing: tuple[int, int] | None = None
        self.error: Exception = ZeroDivisionError("in the model")
        for number, kernel in enumerate(self.kernels):
            self._watch(number, kernel)

    def _watch(self, number: int, kernel: Any) -> None:
        from vllm.v1.worker.ubatching import dbo_current_ubatch_id

        def watched(owner: Any, name: str, kind: str, needed: str) -> None:
            original = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                place = (dbo_current_ubatch_id(), number)
                if kind == "dispatch":
                    self.bounds.append(kernel.prepare_finalize._dispatcher.op.engine.kernels.max_sms)
                self.device.launch((kind, *place), (needed, *place))
                if kind in EXCHANGES:
                    self.device.compute.read[(kind, *place)] = weakref.ref(args[0])
                return original(*args, **kwargs)

            setattr(owner, name, call)

        ours = kernel.prepare_finalize
        for dispatcher in ours._dispatchers:
            watched(dispatcher, "dispatch", "dispatch", "gate")
            watched(dispatcher, "combine", "combine", "experts")
        watched(kernel.fused_experts, "apply", "experts", "dispatch")

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of all layers, one beside the other, for the rows that input_ids numbers; these numbers.

        With sequence parallelism a rank has the first of `sp_size` shares.
        """
        from vllm.v1.worker.ubatching import dbo_current_ubatch_id

        results = []
        index = dbo_current_ubatch_id()
        rows = input_ids[: -(-len(input_ids) // self.sp_size)]
        for number, (case, kernel) in enumerate(zip(self.cases, self.kernels)):
            if self.failing == (index, number):
                raise self.error
            before = ("combine", index, number - 1) if number else None
            self.device.launch(("gate", index, number), before)
            results.append(run_kernel(case, kernel, self.manager.rank, rows))
        return torch.cat(results, 1), rows


def vllm_config(num_micro_batches: int) -> Any:
    from vllm.config import ParallelConfig, VllmConfig

    config = VllmConfig()
    config.parallel_config = ParallelConfig(data_parallel_size=2, enable_expert_parallel=True)
    config.parallel_config.ubatch_size = num_micro_batches
    return config


def split(num_tokens: int, num_micro_batches: int) -> list[Any]:
    """As vLLM splits a step's tokens."""
    import numpy
    from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices

    scheduled = numpy.array([num_tokens], dtype=numpy.int32)
    _, slices = maybe_create_ubatch_slices(True, scheduled, num_tokens, 1, num_micro_batches)
    assert slices is not None
    return list(slices)


class FirstRunner:
    """vLLM's wrapper of the model in its first model runner; `capture` runs a step as it is captured in a graph."""

    forms: tuple[dict[str, bool], ...] = ({}, {"whole": True}, {}, {"capture": True})

    def __init__(self, model: Model, num_micro_batches: int) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

        self.config, self.number = vllm_config(num_micro_batches), num_micro_batches
        self._modes = CUDAGraphMode
        self._wrapper = UBatchWrapper(model, self.config, CUDAGraphMode.NONE, torch.device("cpu"))

    def __call__(self, num_tokens: int, *, whole: bool = False, capture: bool = False) -> Any:
        from vllm.forward_context import DPMetadata, create_forward_context, override_forward_context

        metadata = DPMetadata.make(self.config.parallel_config, num_tokens, torch.tensor([num_tokens] * 2))
        context = create_forward_context(
            None,
            self.config,
            metadata,
            cudagraph_runtime_mode=self._modes.FULL if capture else self._modes.NONE,
            ubatch_slices=None if whole else split(num_tokens, self.number),
        )
        with override_forward_context(context):
            return self._wrapper(**inputs(num_tokens))


class SecondRunner:
    """vLLM's runner of micro-batches in its second model runner, from 0.30 on."""

    forms: tuple[dict[str, bool], ...] = ({}, {}, {"capture": True})

    def __init__(self, model: Model, num_micro_batches: int) -> None:
        from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner

        self.model, self.number = model, num_micro_batches
        config = vllm_config(num_micro_batches)
        model.device.new_streams = itertools.cycle([model.device.comm, model.device.compute])
        self._runner = UBatchRunner(config, torch.device("cpu"), None, [], None, 4)

    def __call__(self, num_tokens: int, *, capture: bool = False) -> Any:
        from vllm.v1.worker.gpu.ubatch_utils import UBatchState

        slices = split(num_tokens, self.number)
        nothing = [None] * self.number
        contexts = self._runner._make_forward_contexts(slices, nothing, [{}] * self.number, nothing)
        state = UBatchState(slices, contexts)
        finish = self._runner.begin_capturable_run(self.model, inputs(num_tokens), state, for_capture=capture)
        with recording_on_cpu() if capture else contextlib.nullcontext():
            return finish()


def inputs(num_tokens: int) -> dict[str, Any]:
    rows = torch.arange(num_tokens)
    return {"input_ids": rows, "positions": rows, "intermediate_tensors": None, "inputs_embeds": None}


def runners(model: Model, num_micro_batches: int = 2) -> list[Any]:
    found: list[Any] = [FirstRunner(model, num_micro_batches)]
    if importlib.util.find_spec("vllm.v1.worker.gpu.ubatch_utils") is not None:
        found.append(SecondRunner(model, num_micro_batches))
    return found
