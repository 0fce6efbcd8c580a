"""Counters of a model's MoE layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a import env
from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.telemetry.counters import InstrumentedOp, StepCounters


class LayerCounters:
    """The counters of all layers of one manager.

    A layer is known by its number (EngineManager.layer_number). A layer that is built again, with other weights,
    keeps its counters: graphs hold their addresses.

    Args:
        num_kept_steps: number of steps, the last ones, whose values are kept for each layer; at least 1.
    """

    def __init__(self, num_kept_steps: int) -> None:
        self.num_kept_steps = num_kept_steps
        self._layers: dict[int, tuple[Any, EpDispatchCombineOp, StepCounters]] = {}

    def exchange_of(self, op: EpDispatchCombineOp, layer: Any, number: int) -> InstrumentedOp:
        """Returns a wrapper of the op that counts the dispatches and combines of a layer.

        Args:
            op: the layer's. layer: what the engine has one of for each layer. number: the layer's.

        Raises:
            UnsupportedError: the op spans several nodes.
        """
        # Triton is loaded when the first op is made
        from ep_a2a.telemetry.counters import InstrumentedOp, StepCounters

        # across nodes, counts of forwarded rows would name their source rank, not their destination
        if op.config.uses_rings:
            raise UnsupportedError(
                f"{env.COUNTERS.name} on one node", "a group of several nodes", f"Unset {env.COUNTERS.name}."
            )
        if number not in self._layers:
            self._layers[number] = layer, op, StepCounters(op.device, self.num_kept_steps)
        return InstrumentedOp(op, self._layers[number][2])

    def clear(self) -> None:
        """Sets all counters to zero; must be called between two steps."""
        for *_, counters in self._layers.values():
            counters.clear()

    def read(self, names: Mapping[int, str]) -> list[dict[str, Any]]:
        """Returns each layer's counters as StepCounters.read gives them, in the order in which layers were built.

        Args:
            names: of layers, by the `id` of `exchange_of`'s layer. A layer without one is named by its position.
        """
        return [
            {"layer": names.get(id(layer), f"layer {place}"), **counters.read(op.config)}
            for place, (layer, op, counters) in enumerate(self._layers.values())
        ]
