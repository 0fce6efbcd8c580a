"""Runs a layer's parts in several orders: one after another, or with communication beside computation.

Two schedules: "micro_batches" splits the tokens over two ops, "shared_expert" has a dense expert to run beside combine.
Each variant computes the same results. Those that overlap use the op's split calls: launches that send never wait for
other ranks, launches that receive do. Exposed communication is what a variant takes beyond the computation alone.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.bench.contenders import SCHEDULES, Contender
from ep_a2a.commands.bench.layer import (
    PAD_ID,
    Gate,
    LayerWorkload,
    Received,
    WholeLayer,
    dense_layer,
    make_weights,
    require_rows,
    run_experts,
)
from ep_a2a.commands.bench.own import OpLayer, op_refusal
from ep_a2a.commands.measure.session import OpVariant
from ep_a2a.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

SHARED_SEED = 78


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
            batch.op.set_max_sms(self._comm_sms)
        if carve_out is not None:
            carve_out(self._comm_sms)
        try:
            yield
        finally:
            if carve_out is not None:
                carve_out(None)
            for batch in batches:
                batch.op.set_max_sms(0)


class Batch(OpLayer):
    """Tokens that go through the layer together: their gate, and an op of their own with its calls split."""

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
    """A variant of a schedule, ready to run.

    Args:
        workload: shapes; its tokens are divided between the batches.
        context: this rank.
        name: schedule/variant.
        num_batches: ops of the layer, each with its part of the tokens.
    """

    def __init__(self, workload: LayerWorkload, context: RankContext, name: str, num_batches: int) -> None:
        super().__init__(workload, context)
        self._variant = name.partition("/")[2]
        self.lanes = Lanes(context.device, workload.comm_sms)
        self._arena = Arena(context.group, context.device)
        weights = make_weights(workload, context)
        num_tokens = workload.num_tokens // num_batches
        part = replace(workload, num_tokens=num_tokens, max_num_tokens=num_tokens)
        self.x = workload.inputs(context.rank, context.device).x
        self.batches = [
            Batch(part, context, (Gate(x.contiguous(), weights.router, workload.topk), weights), self._arena, index)
            for index, x in enumerate(self.x.chunk(num_batches))
        ]

    def run(self) -> Any:
        """Runs the variant."""
        return getattr(self, self._variant)()

    def computation(self) -> Callable[[], Any]:
        """Returns the computation of the layer without communication. Collective."""
        computes = [batch.computation() for batch in self.batches]
        return lambda: [compute() for compute in computes]

    def close(self) -> None:
        """Closes the ops and their arena."""
        for batch in self.batches:
            batch.close()
        self._arena.close()


class MicroBatches(Schedule):
    """Two batches; one's experts run while the other's tokens or rows are on their way."""

    def check(self) -> None:
        """Compares each batch's result with the dense layer."""
        results = self.run()
        # Before any rank raises: the dense layer is collective.
        dense = [dense_layer(batch.workload, batch.gate, batch.weights, self.context) for batch in self.batches]
        for result, want in zip(results, dense, strict=True):
            require_rows(result, want)

    def in_turn(self) -> list[torch.Tensor]:
        """Runs each batch's whole layer, one after another."""
        return [batch.run() for batch in self.batches]

    def overlapped(self) -> list[torch.Tensor]:
        """Runs one batch's experts while the other's tokens or rows are on their way."""
        lanes = self.lanes
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
                    batch.send_back()
                    results.append(batch.receive_back())
            lanes.join()
        return results


class BesideSharedExpert(Schedule):
    """One batch, and an expert that all its tokens go through."""

    def __init__(self, workload: LayerWorkload, context: RankContext, name: str, num_batches: int) -> None:
        super().__init__(workload, context, name, num_batches)
        self.shared = SharedExpert(self.x, workload.intermediate_dim)

    def check(self) -> None:
        """Compares the routed experts' part with the dense layer."""
        (batch,) = self.batches
        routed = self.run().float() - self.shared().float()
        require_rows(routed, dense_layer(self.workload, batch.gate, batch.weights, self.context))

    def computation(self) -> Callable[[], Any]:
        """Returns the routed and the shared experts without communication. Collective."""
        routed = self.batches[0].computation()
        return lambda: routed()[: self.workload.num_tokens] + self.shared()

    def in_turn(self) -> torch.Tensor:
        """Runs the routed experts, then the shared one."""
        return self.batches[0].run() + self.shared()

    def between(self) -> torch.Tensor:
        """Runs the shared expert while the routed ones' rows are on their way, all on one stream."""
        (batch,) = self.batches
        batch.gate()
        run_experts(batch.dispatch(), batch.weights)
        batch.send_back()
        from_shared = self.shared()
        return batch.receive_back() + from_shared

    def beside(self) -> torch.Tensor:
        """Runs the launch that receives beside the shared expert; `between` has it behind."""
        (batch,) = self.batches
        with self.lanes.shared_device(self.batches):
            batch.gate()
            run_experts(batch.dispatch(), batch.weights)
            with self.lanes.communication():
                batch.send_back()
                result = batch.receive_back()
            from_shared = self.shared()
            self.lanes.join()
        return result + from_shared


def _refusal(num_batches: int, workload: Workload, device: torch.device) -> str | None:
    """Returns why the batches cannot share the tokens, or the op refuses them."""
    if workload.num_tokens % num_batches:
        return f"{num_batches} micro-batches cannot share {workload.num_tokens} tokens"
    return op_refusal(OpVariant(), workload, device)


def _contender(name: str) -> Contender:
    schedule, num_batches = (MicroBatches, 2) if name.startswith("micro_batches") else (BesideSharedExpert, 1)
    layer = partial(schedule, name=name, num_batches=num_batches)
    return Contender(name, layer=layer, unavailable=partial(_refusal, num_batches))


CONTENDERS = tuple(map(_contender, SCHEDULES))
