"""A whole MoE layer with fp8 experts, gate to combine, whose communication is a contender's.

All contenders run this code, so their layers differ in communication only; its casts and marks on padding count as
communication. Nothing waits on the host, so a CUDA graph can capture a layer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.commands.bench.experts import check_device, dense_experts, make_weights, quantize_rows, run_experts
from ep_a2a.commands.measure.session import InputsRoundTrip, Received, Session
from ep_a2a.commands.measure.timing import CallsInARow, Timer
from ep_a2a.commands.measure.workload import Inputs, Workload
from ep_a2a.config import QuantType
from ep_a2a.errors import CheckFailedError
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.testing.worker import RankContext

CHOSEN = 32.0
"""Added to the logits of the experts that the workload's routing names: far above all others."""
MAX_CHECKED_TOKENS = 32
"""Tokens of each rank that are compared with the dense layer, which is slow."""
TOLERANCES = {QuantType.NONE: 5e-2, QuantType.FP8_BLOCKWISE: 8e-2}
"""By cast of combine, norm of a row's error over the norm of the row: fp8 products add in few bits, sums are rounded to
bf16 or fp8."""


class Gate:
    """The router of one batch, with results at fixed addresses.

    It multiplies, takes the softmax over all experts and the K largest, as a model does. A bias makes these the
    experts that the workload's routing names.

    Args:
        workload: of the tokens.
        rank: whose they are.
        router: bf16 `[H, num_experts]`.

    Attributes:
        x: tokens bf16 `[T, H]`.
        weights: float32 `[T, K]`. ids: int32 `[T, K]`.
    """

    def __init__(self, workload: Workload, rank: int, router: torch.Tensor) -> None:
        self.x, ids, self.weights = workload.inputs(rank, router.device)
        self._router, self.ids, self._wide_ids = router, ids, ids.long()
        self._bias = torch.zeros(len(ids), workload.experts, dtype=torch.bfloat16, device=router.device)
        self._bias.scatter_(1, self._wide_ids, CHOSEN)

    def __call__(self) -> None:
        """Fills weights and ids."""
        logits = torch.addmm(self._bias, self.x, self._router)
        probabilities = torch.softmax(logits, dim=1, dtype=torch.float32)
        torch.topk(probabilities, self.ids.shape[1], dim=1, out=(self.weights, self._wide_ids))
        self.ids.copy_(self._wide_ids)


class Layer:
    """A layer over a round trip of its gate's tokens, whose parts follow one another on the current stream.

    Args:
        workload: shapes.
        context: this rank and its group.
        make: makes the round trip; takes the workload, the context and the gate's inputs.

    Attributes:
        gate, weights: of the layer.
        communication: the round trip.
        received: the rows of the last dispatch.
    """

    def __init__(self, workload: Workload, context: RankContext, make: Callable[..., InputsRoundTrip]) -> None:
        self.workload, self._context = workload, context
        sizes = workload.experts, workload.hidden, workload.intermediate, workload.ranks
        # layers of one shape share them
        self.weights = make_weights(*sizes, context.rank, context.device)
        self.gate = Gate(workload, context.rank, self.weights.router)
        # Communication is made with ids and weights that could come.
        self.gate()
        self.communication: Any = make(workload, context, Inputs(self.gate.x, self.gate.ids, self.gate.weights))
        self.received: Received
        self._dispatched: Any = None

    def dispatch(self) -> None:
        """Casts, where communication takes cast tokens, and dispatches the gate's tokens."""
        if self.communication.scales is not None:
            quantize_rows(self.gate.x, self.communication.sent, self.communication.scales)
        self._dispatched = self.communication.dispatch()
        self.received = self.communication.received(self._dispatched)

    def combine(self) -> torch.Tensor:
        """Combines the rows that lie in `received.out`; returns the result `[T, H]`."""
        result: torch.Tensor = self.communication.combine(self._dispatched)
        return result

    def run(self) -> torch.Tensor:
        """Runs the whole layer, part after part."""
        self.gate()
        self.dispatch()
        run_experts(self.received, self.weights)
        return self.combine()

    def exchange(self) -> None:
        """Runs the layer's communication alone."""
        self.dispatch()
        self.combine()

    def computation(self) -> Callable[[], None]:
        """Returns the same gate and experts on a copy of received rows. Collective."""
        self.gate()
        self.dispatch()
        copy = Received(*(None if each is None else each.clone() for each in self.received))  # type: ignore[arg-type]
        self.combine()

        def compute() -> None:
            self.gate()
            run_experts(copy, self.weights)

        return compute

    def dense(self) -> torch.Tensor:
        """Returns the first rows of this rank's dense layer, float32: every rank adds its experts' part. Collective.

        The gate has been run.
        """
        num_checked = min(MAX_CHECKED_TOKENS, *self.workload.counts)
        x = self.gate.x[:num_checked]
        if self.workload.quant != QuantType.NONE:
            x = dequantize(*quantize(x, self.workload.quant), self.workload.quant)
        own = x.to(torch.float32), self.gate.ids[:num_checked], self.gate.weights[:num_checked]
        x, ids, weights = (_of_all_ranks(each, self._context) for each in own)
        part = dense_experts(x, ids, weights, self.weights)
        dist.all_reduce(part, group=self._context.group)
        return part[self._context.rank * num_checked :][:num_checked]


def _of_all_ranks(rows: torch.Tensor, context: RankContext) -> torch.Tensor:
    parts = [torch.empty_like(rows) for _ in range(context.world_size)]
    dist.all_gather(parts, rows.contiguous(), group=context.group)
    return torch.cat(parts)


class Layers(Session):
    """Layers of one or more batches of tokens, one after another. Graph-safe.

    Args:
        context: this rank and its group.
        batches: a layer for each batch.
    """

    def __init__(self, context: RankContext, batches: Sequence[Layer]) -> None:
        super().__init__()
        self._context, self.batches = context, batches
        check_device(context.device)
        self.details = batches[0].communication.details
        self._queued: dict[str, CallsInARow] = {}
        self._timed_once: dict[str, float] = {}

    def run(self) -> list[torch.Tensor]:
        """Runs the layer of each batch; returns their results."""
        return [batch.run() for batch in self.batches]

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Returns what is timed, by name: the exchanges alone, the gates and experts alone, and the layers."""
        computations = [batch.computation() for batch in self.batches]
        exchanges = [batch.exchange for batch in self.batches]
        return {"exchange": partial(_each, exchanges), "experts": partial(_each, computations), "layer": self.run}

    def measure(self, timer: Timer) -> dict[str, Any]:
        """Returns microseconds of each of `calls`, as `layer_us` and so on; what is timed is captured once.

        Exchanges alone are timed once: a GPU cools down meanwhile, and what is timed next would seem faster.
        """
        if not self._queued:
            calls = self.calls()
            exchange = calls.pop("exchange", None)
            self._timed_once = {} if exchange is None else {"exchange_us": timer.median_us(exchange)}
            self._queued = {f"{name}_us": timer.queue(call) for name, call in calls.items()}
        return self._timed_once | {name: timer.time(queued) for name, queued in self._queued.items()}

    def check(self) -> None:
        """Compares a run with the dense layer."""
        results = self.run()
        # Before any rank raises: the dense layer is collective.
        dense = [batch.dense() for batch in self.batches]
        for batch, result, want in zip(self.batches, results, dense, strict=True):
            require_rows(result, want, TOLERANCES[QuantType(batch.workload.combine_quant)])

    def check_timed(self) -> None:
        """Compares one more run with the dense layer."""
        self.check()

    def close(self) -> None:
        """Frees what was captured, and closes the round trips."""
        for queued in self._queued.values():
            queued.close()
        for batch in self.batches:
            batch.communication.close()


def _each(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def require_rows(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCES[QuantType.NONE]) -> None:
    """Compares the first rows of a layer's result `[T, H]` with those of the dense layer; tolerance: of TOLERANCES.

    Raises:
        CheckFailedError: a row is too far off.
    """
    error = (got[: len(want)].float() - want).norm(dim=1)
    allowed = tolerance * want.norm(dim=1)
    if not bool((error <= allowed).all()):
        token = int((error - allowed).nan_to_num(torch.inf).argmax())
        raise CheckFailedError(
            f"the dense layer's rows within {tolerance:g} of their norms",
            f"{float(error[token]):g} off where the norm is {float(want[token].norm()):g}, in token {token}",
        )
