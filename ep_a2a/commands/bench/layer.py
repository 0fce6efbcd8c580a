"""A whole MoE layer, gate to combine, over each transport: what of its time is communication.

python -m ep_a2a.commands.bench.layer --ranks 4 --tokens 128 512 4096 --quant fp8_per_1x128

The layer is checked against the dense layer, then timed as CUDA graph replays, many layers in a graph. "compute" is
the same gate and experts on rows that lie ready; communication is what the layer takes beyond that.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contender import Session
from ep_a2a.commands.bench.layer_experts import Received, run_experts
from ep_a2a.commands.bench.layer_model import Gate, MoEWeights, check_layer, make_weights
from ep_a2a.commands.bench.layer_report import layer_parser, layer_workload, parse_options, run_sweep, timing_settings
from ep_a2a.commands.bench.layer_transports import TRANSPORTS, Transport, check_transports
from ep_a2a.commands.bench.timing import TimingSettings, make_clock, summarize, time_round_trips
from ep_a2a.memory.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ep_a2a.commands.bench.contender import BenchContext
    from ep_a2a.commands.bench.workload import Workload

COLUMNS = ("tokens", "quant", "transport", "layer_us", "compute_us", "communication_us", "communication_share")


class LayerSession(Session):
    """One layer: gate and dispatch, then experts and combine.

    Args:
        transport: made for gate's batch; closed with the session.
        gate, weights: of this rank.
        check_with: called by `check` with a result.
    """

    def __init__(
        self, transport: Transport, gate: Gate, weights: MoEWeights, check_with: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__()
        self._transport, self._gate, self._weights, self._check_with = transport, gate, weights, check_with

    def dispatch(self) -> Received:
        """The router, and the tokens to the experts' ranks."""
        self._gate()
        return self._transport.dispatch()

    def combine(self, dispatched: Any) -> torch.Tensor:
        """The experts, and their rows back: `[T, H]`."""
        run_experts(dispatched, self._weights)
        return self._transport.combine()

    def check(self) -> None:
        """Hands a result to `check_with`."""
        self._check_with(self.combine(self.dispatch()))

    def close(self) -> None:
        """Closes the transport."""
        self._transport.close()


class ComputeSession(Session):
    """The same gate and experts without communication, on a copy of what a transport delivered."""

    def __init__(self, received: Received, gate: Gate, weights: MoEWeights) -> None:
        super().__init__()
        self._received = Received(*(None if each is None else each.clone() for each in received))  # type: ignore[arg-type]
        self._gate, self._weights = gate, weights

    def dispatch(self) -> Received:
        """The router."""
        self._gate()
        return self._received

    def combine(self, dispatched: Any) -> torch.Tensor:
        """The experts."""
        run_experts(dispatched, self._weights)
        return self._received.out

    def check(self) -> None:
        """Nothing of its own: the layer has been checked."""


def time_session(session: Session, context: BenchContext, rendezvous: Rendezvous, settings: TimingSettings) -> float:
    """Microseconds of one of many dispatch + combine in a row: median of each rank, the slowest rank. Collective."""
    in_graph = context.device.type == "cuda"
    times_us = time_round_trips(session, make_clock(context), settings, in_graph=in_graph)
    return summarize(rendezvous.exchange("layer times", times_us)).p50_us


def run_layers(
    context: BenchContext, workload: Workload, intermediate_dim: int, names: tuple[str, ...], settings: TimingSettings
) -> list[dict[str, Any]]:
    """One row per transport, the same on all ranks. Collective.

    Raises:
        CheckFailedError: a transport's layer is not the dense layer.
    """
    check_transports(names, workload)
    rendezvous = Rendezvous(context.group)
    weights = make_weights(workload, intermediate_dim, context)
    gate = Gate(workload.inputs(context.rank, context.device).x, weights.router, workload.topk)
    return [_run_transport(name, context, workload, gate, weights, rendezvous, settings) for name in names]


def _run_transport(
    name: str, context: BenchContext, workload: Workload, gate: Gate, weights: MoEWeights, rendezvous: Rendezvous,
    settings: TimingSettings,
) -> dict[str, Any]:  # fmt: skip
    row: dict[str, Any] = {"tokens": workload.num_tokens, "quant": workload.quant_type, "transport": name}
    reason = TRANSPORTS[name].unavailable(workload, context.device)
    if reason is not None:
        return row | {"unavailable": reason}
    gate()
    check = functools.partial(check_layer, name, workload, gate, weights, context)
    with LayerSession(TRANSPORTS[name](workload, gate, context), gate, weights, check) as layer:
        layer.check()
        layer_us = time_session(layer, context, rendezvous, settings)
        layer.check()
        dispatched = layer.dispatch()
        compute = ComputeSession(dispatched, gate, weights)
        layer.combine(dispatched)
        compute_us = time_session(compute, context, rendezvous, settings)
    communication_us = layer_us - compute_us
    return row | {
        "layer_us": layer_us, "compute_us": compute_us, "communication_us": communication_us,
        "communication_share": communication_us / layer_us,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = layer_parser("python -m ep_a2a.commands.bench.layer", __doc__.partition("\n")[0])
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=list(TRANSPORTS), help="which")
    options = parse_options(parser, arguments)
    tasks = [
        (layer_workload(options, num_tokens), options.intermediate, tuple(options.transports), timing_settings(options))
        for num_tokens in options.tokens
    ]
    run_sweep(options, run_layers, tasks, COLUMNS)


if __name__ == "__main__":
    main()
