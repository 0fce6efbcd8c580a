"""Launches a MoE layer's parts in several orders: one after another, or with communication beside computation.

Every schedule computes the same results. Those that overlap use the op's split calls: launches that send never wait
for other ranks, launches that receive do.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.bench.layer_model import Gate, MoEWeights, Received, run_experts
from ep_a2a.commands.bench.layer_transports import PAD_ID, OpTransport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.memory.arena import Arena
    from ep_a2a.testing.worker import RankContext


class Lanes:
    """The current stream, for computation, and one beside it for communication; CPU work keeps the program's order.

    Args:
        device: where the streams are.
        comm_sms: multiprocessors that the ops may occupy and that torch's grouped products leave free; 0 = no bound.
    """

    def __init__(self, device: torch.device, comm_sms: int = 0) -> None:
        self._cuda, self.comm_sms = device.type == "cuda", comm_sms
        # High priority: the few programs of an op start before the many of the next product.
        self._beside = torch.cuda.Stream(device, priority=-1) if self._cuda else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        """Moves launches inside to the stream beside the current one, after the current one's earlier launches."""
        if self._beside is None:
            yield
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            yield

    def arrival(self) -> Any:
        """Returns a point in the current stream's order, to `wait` for; inside `communication`, in the one beside."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, arrival: Any) -> None:
        """Orders the current stream's next launches after `arrival`."""
        if arrival is not None:
            torch.cuda.current_stream().wait_event(arrival)

    def join(self) -> None:
        """Orders the current stream's next launches after all communication."""
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    @contextlib.contextmanager
    def shared_device(self, batches: Sequence[Batch]) -> Iterator[None]:
        """Divides the multiprocessors between ops and grouped products launched inside, as comm_sms says."""
        carve_out = getattr(torch._C, "_set_sm_carveout_experimental", None)
        bounded = self._cuda and self.comm_sms > 0
        for batch in batches:
            batch.op.set_max_sms(self.comm_sms if bounded else 0)
        if bounded and carve_out is not None:
            carve_out(self.comm_sms)
        try:
            yield
        finally:
            if bounded and carve_out is not None:
                carve_out(None)
            for batch in batches:
                batch.op.set_max_sms(0)


class Batch(OpTransport):
    """Tokens that go through the layer together: their gate, and an op of their own with its calls split.

    Args:
        workload: of this batch.
        x: its tokens, bf16 `[T, H]`.
        weights: the layer's.
        arena, index: the op's memory; batches in flight together have different indices.
    """

    def __init__(
        self, workload: Workload, x: torch.Tensor, weights: MoEWeights, context: RankContext, arena: Arena, index: int
    ) -> None:
        super().__init__(workload, Gate(x, weights.router, workload.topk), weights, context, arena, index)

    def send(self) -> None:
        """Sends the tokens."""
        self.op.dispatch_send(self.gate.x, self.gate.weights, None, self.gate.ids, pad_id=PAD_ID)

    def receive(self) -> Received:
        """Waits for the tokens of all ranks."""
        return self.received(self.op.dispatch_recv())

    def send_back(self) -> None:
        """Sends the experts' rows."""
        self.op.combine_send(self.rows)

    def receive_back(self) -> torch.Tensor:
        """Waits for the rows of all ranks: the result `[T, H]`."""
        result: torch.Tensor = self.op.combine_recv()[0]
        return result[: self.workload.num_tokens]


class SharedExpert:
    """A dense SwiGLU that every token goes through, on its own rank.

    Args:
        x: tokens bf16 `[T, H]`.
        w1, w2: bf16 `[2F, H]` and `[H, F]`.
    """

    def __init__(self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
        self._x, self._w1, self._w2 = x, w1, w2

    def __call__(self) -> torch.Tensor:
        """Returns the expert's result `[T, H]`."""
        gate, up = (self._x @ self._w1.T).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ self._w2.T


def batches_in_turn(batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Runs each batch's whole layer, one after another."""
    return [batch.run() for batch in batches]


def batches_overlapped(batches: Sequence[Batch], lanes: Lanes) -> list[torch.Tensor]:
    """Runs one batch's experts while the other's tokens or rows are on their way."""
    with lanes.shared_device(batches):
        for batch in batches:
            batch.gate()
            with lanes.communication():
                batch.send()
        arrived = []
        with lanes.communication():
            for batch in batches:
                arrived.append((batch.receive(), lanes.arrival()))
        results = []
        for batch, (received, arrival) in zip(batches, arrived):
            lanes.wait(arrival)
            run_experts(received, batch.weights)
            with lanes.communication():
                batch.send_back()
                results.append(batch.receive_back())
        lanes.join()
    return results


def shared_in_turn(batch: Batch, shared: SharedExpert) -> torch.Tensor:
    """Runs the routed experts, then the shared one."""
    return batch.run() + shared()


def shared_between(batch: Batch, shared: SharedExpert) -> torch.Tensor:
    """Runs the shared expert while the routed ones' rows are on their way, all on one stream."""
    batch.gate()
    run_experts(batch.dispatch(), batch.weights)
    batch.send_back()
    from_shared = shared()
    return batch.receive_back() + from_shared


def shared_beside(batch: Batch, shared: SharedExpert, lanes: Lanes) -> torch.Tensor:
    """Runs the launch that receives beside the shared expert; `shared_between` has it behind."""
    with lanes.shared_device([batch]):
        batch.gate()
        run_experts(batch.dispatch(), batch.weights)
        with lanes.communication():
            batch.send_back()
            result = batch.receive_back()
        from_shared = shared()
        lanes.join()
    return result + from_shared
