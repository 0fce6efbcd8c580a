"""Runs a layer's parts in several orders: one after another, or with communication beside computation.

Two schedules: "micro_batches" splits the tokens over two ops, "shared_expert" has a dense expert to run beside combine.
Each variant computes the same results. Those that overlap use the op's split calls: launches that send never wait for
other ranks, launches that receive do. Exposed communication is what a variant takes beyond the computation alone.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ep_a2a.commands.bench.contenders import SCHEDULES, Contender
from ep_a2a.commands.bench.layer import (
    Gate,
    Layer,
    LayerWorkload,
    WholeLayer,
    dense_layer,
    make_weights,
    require_rows,
    run_experts,
)
from ep_a2a.commands.bench.own import op_refusal
from ep_a2a.commands.measure.session import OpRoundTrip, OpVariant, Received
from ep_a2a.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

SHARED_SEED = 78
NUM_BATCHES = {"micro_batches": 2, "shared_expert": 1}
"""Ops of a layer, each with its part of the tokens, by schedule."""


class Lanes:
    """The current stream, for computation, and one beside it for communication; CPU work keeps the program's order.

    Args:
        device: where the streams are.
        comm_sms: multiprocessors that the ops may occupy and that torch's grouped products leave free; 0 = no bound.
    """

    def __init__(self, device: torch.device, comm_sms: int) -> None:
        self._comm_sms = comm_sms if device.type == "cuda" else 0
        self._beside: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # High priority: the few programs of an op start before the many of the next product.
            self._beside = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        """Moves launches inside to the stream beside the current one, after the current one's earlier launches."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            yield

    def arrival(self) -> Callable[[], None]:
        """Returns what orders the current stream's next launches after this point, in the stream beside or not."""
        if self._beside is None:
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def join(self) -> None:
        """Orders the current stream's next launches after all communication."""
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    @contextlib.contextmanager
    def shared_device(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Divides the multiprocessors between ops and grouped products launched inside, as comm_sms says."""
        carve_out = getattr(torch._C, "_set_sm_carveout_experimental", None) if self._comm_sms else None
        for batch in batches:
            batch.communication.op.set_max_sms(self._comm_sms)
        if carve_out is not None:
            carve_out(self._comm_sms)
        try:
            yield
        finally:
            if carve_out is not None:
                carve_out(None)
            for batch in batches:
                batch.communication.op.set_max_sms(0)


class Batch(Layer):
    """Tokens that go through the layer together: their gate, and an op of their own with its calls split."""

    def send(self) -> None:
        """Sends the tokens."""
        self.communication.op.dispatch_send(self.gate.x, self.gate.weights, None, self.gate.ids)

    def receive(self) -> Received:
        """Waits for the tokens of all ranks."""
        received: Received = self.communication.received(self.communication.op.dispatch_recv())
        return received

    def send_back(self, received: Received) -> None:
        """Sends the experts' rows."""
        self.communication.op.combine_send(received.out)

    def receive_back(self) -> torch.Tensor:
        """Waits for the rows of all ranks: the result `[T, H]`."""
        result: torch.Tensor = self.communication.op.combine_recv()[0]
        return result[: self.workload.num_tokens]


class SharedExpert:
    """A dense SwiGLU that every token goes through, on its own rank.

    Args:
        x: tokens bf16 `[T, H]`.
        width: F; the weights are drawn, the same on all ranks.
    """

    def __init__(self, x: torch.Tensor, width: int) -> None:
        generator = torch.Generator(x.device).manual_seed(SHARED_SEED)
        hidden = x.shape[1]
        self._x = x
        self._w1, self._w2 = (
            torch.randn(*shape, generator=generator, device=x.device, dtype=torch.bfloat16) / shape[1] ** 0.5
            for shape in ((2 * width, hidden), (hidden, width))
        )

    def __call__(self) -> torch.Tensor:
        """Returns the expert's result `[T, H]`."""
        gate, up = (self._x @ self._w1.T).chunk(2, dim=1)
        result: torch.Tensor = (torch.nn.functional.silu(gate) * up) @ self._w2.T
        return result


class Schedule(WholeLayer):
    """A variant of a schedule, ready to run; its results are a tensor per batch.

    Args:
        workload: shapes; its tokens are divided between the batches.
        context: this rank.
        name: schedule/variant.
    """

    def __init__(self, workload: LayerWorkload, context: RankContext, name: str) -> None:
        super().__init__(workload, context)
        schedule, _, self._variant = name.partition("/")
        self._lanes = Lanes(context.device, workload.comm_sms)
        self._arena = Arena(context.group, context.device)
        weights = make_weights(workload, context)
        tokens = workload.inputs(context.rank, context.device).x
        self.batches = []
        for index, x in enumerate(tokens.chunk(NUM_BATCHES[schedule])):
            part = replace(workload, num_tokens=len(x), max_num_tokens=len(x))
            model = Gate(x.contiguous(), weights.router, workload.topk), weights
            op = partial(OpRoundTrip, arena=self._arena, index=index)
            self.batches.append(Batch(part, context, op, model))
        self._shared = None if schedule == "micro_batches" else SharedExpert(tokens, workload.intermediate_dim)

    def run(self) -> list[torch.Tensor]:
        """Runs the variant."""
        results: list[torch.Tensor] = getattr(self, self._variant)()
        return results

    def check(self) -> None:
        """Compares each batch's result, without the shared expert's part, with the dense layer."""
        results = self.run()
        # Before any rank raises: the dense layer is collective.
        dense = [dense_layer(batch.workload, batch.gate, batch.weights, self.context) for batch in self.batches]
        for result, want in zip(results, dense, strict=True):
            require_rows(result if self._shared is None else result.float() - self._shared().float(), want)

    def computation(self) -> Callable[[], list[torch.Tensor]]:
        """Returns the computation of the layer without communication. Collective."""
        computes = [batch.computation() for batch in self.batches]
        return lambda: [self._with_shared(compute()[: self.workload.num_tokens]) for compute in computes]

    def in_turn(self) -> list[torch.Tensor]:
        """Runs each batch's whole layer, one after another, then the shared expert."""
        return [self._with_shared(batch.run()) for batch in self.batches]

    def overlapped(self) -> list[torch.Tensor]:
        """Runs one batch's experts while the other's tokens or rows are on their way."""
        lanes = self._lanes
        with lanes.shared_device(self.batches):
            for batch in self.batches:
                batch.gate()
                with lanes.communication():
                    batch.send()
            arrived = []
            with lanes.communication():
                for batch in self.batches:
                    arrived.append((batch.receive(), lanes.arrival()))
            results = []
            for batch, (received, wait_for_arrival) in zip(self.batches, arrived):
                wait_for_arrival()
                run_experts(received, batch.weights)
                with lanes.communication():
                    batch.send_back(received)
                    results.append(batch.receive_back())
            lanes.join()
        return results

    def between(self) -> list[torch.Tensor]:
        """Runs the shared expert while the routed ones' rows are on their way, all on one stream."""
        assert self._shared is not None
        (batch,) = self.batches
        _, received = batch.run_to_experts()
        run_experts(received, batch.weights)
        batch.send_back(received)
        from_shared = self._shared()
        return [batch.receive_back() + from_shared]

    def beside(self) -> list[torch.Tensor]:
        """Runs the launch that receives beside the shared expert; `between` has it behind."""
        assert self._shared is not None
        (batch,) = self.batches
        with self._lanes.shared_device(self.batches):
            _, received = batch.run_to_experts()
            run_experts(received, batch.weights)
            with self._lanes.communication():
                batch.send_back(received)
                result = batch.receive_back()
            from_shared = self._shared()
            self._lanes.join()
        return [result + from_shared]

    def close(self) -> None:
        """Closes the ops and their arena."""
        for batch in self.batches:
            batch.close()
        self._arena.close()

    def _with_shared(self, result: torch.Tensor) -> torch.Tensor:
        return result if self._shared is None else result + self._shared()


def _contender(name: str) -> Contender:
    num_batches = NUM_BATCHES[name.partition("/")[0]]

    def refusal(workload: Workload, device: torch.device) -> str | None:
        if workload.num_tokens % num_batches:
            return f"{num_batches} micro-batches cannot share {workload.num_tokens} tokens"
        return op_refusal(OpVariant(), workload, device)

    return Contender(name, layer=partial(Schedule, name=name), unavailable=refusal)


CONTENDERS = tuple(map(_contender, SCHEDULES))
