"""Counters of a model's MoE layers, and how vLLM's collective_rpc reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a import env
from ep_a2a.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ep_a2a.integrations.vllm.manager import VllmAll2AllManager
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.telemetry.counters import CountedExchange, StepCounters

RPC_METHOD = "ep_a2a_counters"


class LayerCounters:
    """The counters of all layers of one manager.

    A layer is known by its FusedMoEConfig, which vLLM makes once for each. So a layer that is built again, with other
    weights, goes on with the same counters: graphs hold their addresses.

    Args:
        num_kept_steps: latest steps of a layer that are kept singly; 1 at least.
    """

    def __init__(self, num_kept_steps: int) -> None:
        self.num_kept_steps = num_kept_steps
        self._layers: list[tuple[Any, EpDispatchCombineOp, StepCounters]] = []

    @classmethod
    def wanted(cls) -> LayerCounters | None:
        """Counters if EP_A2A_COUNTERS asks for them."""
        num_kept_steps = env.COUNTERS.get()
        return cls(num_kept_steps) if num_kept_steps else None

    def exchange_of(self, op: EpDispatchCombineOp, moe: Any) -> CountedExchange:
        """What counts the dispatches and combines of a layer.

        Args:
            op: the layer's. moe: its FusedMoEConfig.

        Raises:
            UnsupportedError: the op spans several nodes.
        """
        # Triton is loaded when the first op is made
        from ep_a2a.ops.op import EpDispatchCombineOp
        from ep_a2a.telemetry.counters import CountedExchange, StepCounters

        # forwarded rows would count where their tokens come from, not where they are sent
        if not isinstance(op, EpDispatchCombineOp) or op.config.uses_rings:
            raise UnsupportedError(
                f"{env.COUNTERS.name} on one node", "a group of several nodes", f"Unset {env.COUNTERS.name}."
            )
        known = [counters for other, _, counters in self._layers if other is moe]
        counters = known[0] if known else StepCounters(op.device, self.num_kept_steps)
        if not known:
            self._layers.append((moe, op, counters))
        return CountedExchange(op, counters)

    def clear(self) -> None:
        """Begins anew; between two steps."""
        for *_, counters in self._layers:
            counters.clear()

    def read(self, modules: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each layer has counted, in the order in which the layers were built; see StepCounters.read.

        Args:
            modules: by name, among others vLLM's MoE layers; one that is not there is named by its place in this list.
        """
        names = {id(module.moe_config): name for name, module in modules.items() if hasattr(module, "moe_config")}
        return [
            {"layer": names.get(id(moe), f"layer {place}"), **counters.read(op.config)}
            for place, (moe, op, counters) in enumerate(self._layers)
        ]


def read_counters(managers: Iterable[VllmAll2AllManager], modules: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's counters, as JSON takes them: rank and num_ranks of the expert-parallel group, and layers.

    Args:
        managers: of this process. modules: see LayerCounters.read.

    Raises:
        StateError: nothing is counted.
    """
    for manager in managers:
        if manager.counters is not None:
            layers = manager.counters.read(modules)
            return {"rank": manager.rank, "num_ranks": manager.world_size, "layers": layers}
    raise StateError(
        f"{env.COUNTERS.name} in the workers' environment", "none, so that nothing is counted",
        f"Set {env.COUNTERS.name} to a number of steps when the engine is started.",
    )  # fmt: skip
