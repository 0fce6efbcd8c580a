"""Times a whole MoE layer, gate to combine, over each transport, and the share of communication in it.

python -m ep_a2a.commands.bench.layer --ranks 4 --tokens 128 512 4096 --quant fp8_per_1x128

The layer is checked against the dense layer, then timed as CUDA graph replays, many layers in a graph. "compute" is
the same gate and experts on rows that lie ready; "communication" is the rest of the layer's time.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contender import Session
from ep_a2a.commands.bench.layer_experts import Received, run_experts
from ep_a2a.commands.bench.layer_model import Gate, MoEWeights, check_layer, make_weights
from ep_a2a.commands.bench.layer_report import layer_parser, layer_workload, parse_options, run_sweep, timing_settings
from ep_a2a.commands.bench.layer_transports import TRANSPORTS, check_transports
from ep_a2a.commands.bench.timing import TimingSettings, make_clock, summarize, time_round_trips
from ep_a2a.memory.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ep_a2a.commands.bench.contender import BenchContext
    from ep_a2a.commands.bench.workload import Workload

COLUMNS = ("tokens", "quant", "transport", "layer_us", "compute_us", "communication_us", "communication_share")


class WorkSession(Session):
    """One layer as one piece of work, so that its parts may cross.

    Args:
        work: runs the layer; returns its result.
        check: looks at a result.
    """

    def __init__(self, work: Callable[[], Any], check: Callable[[Any], None] = lambda result: None) -> None:
        super().__init__()
        self._work, self._check = work, check

    def dispatch(self) -> None:
        """Does nothing: `combine` does everything."""

    def combine(self, dispatched: Any) -> Any:
        """Runs the work."""
        return self._work()

    def check(self) -> None:
        """Hands a result to the check."""
        self._check(self._work())


def computation_of(received: Received, gate: Gate, weights: MoEWeights) -> Callable[[], torch.Tensor]:
    """Returns the same gate and experts without communication, on a copy of what a transport delivered."""
    copy = Received(*(None if each is None else each.clone() for each in received))  # type: ignore[arg-type]

    def compute() -> torch.Tensor:
        gate()
        run_experts(copy, weights)
        return copy.out

    return compute


def time_session(session: Session, context: BenchContext, rendezvous: Rendezvous, settings: TimingSettings) -> float:
    """Returns microseconds of one of many layers in a row: median of each rank, the slowest rank. Collective."""
    in_graph = context.device.type == "cuda"
    times_us = time_round_trips(session, make_clock(context), settings, in_graph=in_graph)
    return summarize(rendezvous.exchange("layer times", times_us)).p50_us


def run_layers(
    context: BenchContext, workload: Workload, intermediate_dim: int, names: tuple[str, ...], settings: TimingSettings
) -> list[dict[str, Any]]:
    """Returns one row per transport, the same on all ranks. Collective.

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
    transport = TRANSPORTS[name](workload, gate, context)

    def run_layer() -> torch.Tensor:
        gate()
        run_experts(transport.dispatch(), weights)
        return transport.combine()

    layer = WorkSession(run_layer, functools.partial(check_layer, name, workload, gate, weights, context))
    with contextlib.closing(transport):
        layer.check()
        layer_us = time_session(layer, context, rendezvous, settings)
        layer.check()
        compute = computation_of(transport.dispatch(), gate, weights)
        transport.combine()
        compute_us = time_session(WorkSession(compute), context, rendezvous, settings)
    communication_us = layer_us - compute_us
    return row | {
        "layer_us": layer_us, "compute_us": compute_us, "communication_us": communication_us,
        "communication_share": communication_us / layer_us,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
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
