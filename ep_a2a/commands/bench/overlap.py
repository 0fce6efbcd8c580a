"""Layers of two micro-batches: one after another, beside each other, and as one batch of twice the tokens.

Each micro-batch has an op of its own. Beside each other, one's exchange runs on few multiprocessors while the other's
experts run on the rest, or in small programs on the multiprocessors of the experts. This is the steady state of a model
with many layers: a run begins and ends where one batch has its tokens and the other its experts' rows.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ep_a2a.commands.bench.experts import begin_experts, finish_experts, run_experts
from ep_a2a.commands.bench.layer import Layer, Layers
from ep_a2a.commands.measure.session import OpRoundTrip
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.testing.worker import RankContext

DISPATCH_SHARE = 3, 4
"""Multiprocessors of a dispatch by those of a combine: with as many, it would end long before the product beside it."""


class Lanes:
    """The current stream, for computation, and one of high priority beside it for exchanges.

    Args:
        device: where the streams are; the current one of its kind.
    """

    def __init__(self, device: torch.device) -> None:
        # that of the CPU has streams that order nothing
        self._module: Any = torch.get_device_module(device)
        # High priority: the few programs of an op start before the many of the next product.
        self._beside = self._module.Stream(priority=-1)

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Moves launches inside to the stream beside the current one, after the current one's earlier launches."""
        self._beside.wait_stream(self._module.current_stream())
        with self._module.stream(self._beside):
            yield

    def join(self) -> None:
        """Orders the current stream's next launches after all exchanges."""
        self._module.current_stream().wait_stream(self._beside)


class Overlapped(Layers):
    """Two micro-batches that run beside each other; between two runs both have their tokens, the second its rows.

    Args:
        workload: of one micro-batch.
        context: this rank.
        num_sms: multiprocessors of a combine, which products leave to it; 0 = no bound.
        shares_sm: whether an exchange runs on the products' multiprocessors.
    """

    def __init__(self, workload: Workload, context: RankContext, num_sms: int = 0, *, shares_sm: bool = False) -> None:
        super().__init__(context, make_batches(workload, context))
        self._num_sms, self._shares_sm = num_sms, shares_sm
        self._dispatch_sms = num_sms and max(1, num_sms * DISPATCH_SHARE[0] // DISPATCH_SHARE[1])
        self._lanes = Lanes(context.device)
        for batch in self.batches:
            batch.gate()
            with self._lanes.exchange():
                batch.dispatch()
        self._lanes.join()
        run_experts(self.batches[1].received, self.batches[1].weights)

    def run(self) -> list[torch.Tensor]:
        """Runs a layer of both; returns the results that have come, one of each."""
        first, second = self.batches
        results = {}
        for ahead, behind in ((first, second), (second, first)):
            behind.communication.op.set_max_sms(self._num_sms, shares_sm=self._shares_sm)
            with self._lanes.exchange():
                results[behind] = behind.combine()
            activated = begin_experts(ahead.received, ahead.weights, self._num_sms)
            self._lanes.join()
            # The next layer's gate needs the combined tokens, and all multiprocessors. Here combine, which takes longer
            # than dispatch, has the larger part of the experts beside it.
            behind.gate()
            behind.communication.op.set_max_sms(self._dispatch_sms, shares_sm=self._shares_sm)
            with self._lanes.exchange():
                behind.dispatch()
            finish_experts(activated, ahead.received, ahead.weights, self._dispatch_sms)
            self._lanes.join()
        return [results[batch] for batch in self.batches]

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Returns the layer only; in_turn has its experts and its exchanges alone."""
        return {"layer": self.run}

    def close(self) -> None:
        """Combines what has been dispatched, so that the ops can be closed."""
        for batch in self.batches:
            with self._lanes.exchange():
                batch.combine()
        self._lanes.join()
        super().close()


def make_batches(workload: Workload, context: RankContext) -> list[Layer]:
    """Returns a layer for each micro-batch, with tokens of its own. Collective."""
    return [Layer(replace(workload, seed=workload.seed + number), context, OpRoundTrip) for number in range(2)]


def in_turn(workload: Workload, context: RankContext) -> Layers:
    """Makes two micro-batches whose layers follow one another."""
    return Layers(context, make_batches(workload, context))


def unsplit(workload: Workload, context: RankContext) -> Layers:
    """Makes one batch of twice the tokens."""
    return Layers(context, [Layer(replace(workload, tokens=2 * workload.tokens), context, OpRoundTrip)])
