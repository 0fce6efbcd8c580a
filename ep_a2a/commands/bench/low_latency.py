"""Runs Triton-distributed's low-latency layer on this package's op: rows by expert, weights given to combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contenders import Contender, InputsSession, Session
from ep_a2a.commands.bench.native import identity_experts
from ep_a2a.compat.triton_distributed import EPLowLatencyAllToAllLayer
from ep_a2a.compat.triton_distributed.phases import make_config
from ep_a2a.config import FP8_GROUP_SIZE, Layout, QuantType
from ep_a2a.errors import EpA2AError, without_section
from ep_a2a.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext


class LowLatencyLayerSession(InputsSession):
    """The layer with one workload's inputs."""

    def __init__(self, workload: Workload, context: RankContext, contender: LowLatencyLayerContender) -> None:
        super().__init__(workload, context, contender)
        self._arena = Arena(context.group, context.device)
        try:
            self._layer = EPLowLatencyAllToAllLayer(
                **contender.arguments(workload),
                rank=context.rank,
                enable_profiling=contender.records_spans,
                arena=self._arena,
            )
        except Exception:
            self._arena.close()
            raise
        dispatched = self.dispatch()
        tokens, scales, counts, _ = dispatched
        self._rows = identity_experts(workload, tokens, scales, counts)
        self.combine(dispatched)

    def dispatch(self) -> Any:
        """Sends tokens and ids; combine takes the router's weights."""
        return self._layer.dispatch(self._x, None, self._ids)

    def combine(self, dispatched: Any) -> torch.Tensor:
        """Combines the experts' rows, which lie ready, weighed and added."""
        return self._layer.combine(self._rows, None, self._weights, dispatched[3])

    def check(self) -> None:
        """Checks a round trip through each set of buffers."""
        super().check()
        super().check()
        self.check_timed()

    def _copies(self) -> torch.Tensor:
        return self._workload.valid_weights(self._context.rank)

    def check_timed(self) -> None:
        """Checks that no kernel has recorded a failure."""
        for buffers in self._layer.dispatch_ctx.phases:
            buffers.op.check()

    def close(self) -> None:
        """Finalises the layer and gives its memory back."""
        self._layer.finalize()
        self._arena.close()


@dataclass
class LowLatencyLayerContender(Contender):
    """`EPLowLatencyAllToAllLayer`, its two sets of buffers in turn.

    Attributes:
        records_spans: the layer's enable_profiling, to show what recording costs.
    """

    name: str = "ep_low_latency"
    session: Callable[..., Session] = LowLatencyLayerSession
    records_spans: bool = False

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Returns why the layer cannot run the workload; None where it can."""
        if workload.layout != Layout.EXPERT_MAJOR:
            return "has layout expert_major only"
        if workload.combine_quant != QuantType.NONE or workload.max_sms or workload.num_nodes > 1:
            return "knows no cast in combine, no bound on multiprocessors and one node"
        try:
            make_config(**self.arguments(workload), rank=0)
        except EpA2AError as error:
            return without_section(str(error))
        return None

    @staticmethod
    def arguments(workload: Workload) -> dict[str, Any]:
        """Returns the layer's arguments that are equal on all ranks."""
        per_token = workload.quant_type == QuantType.FP8_PER_TOKEN
        return {
            "max_m": workload.max_num_tokens,
            "hidden": workload.hidden_dim,
            "topk": workload.topk,
            "online_quant_fp8": workload.quant_type != QuantType.NONE,
            "num_experts": workload.num_experts,
            "local_world_size": workload.world_size,
            "world_size": workload.world_size,
            "fp8_gsize": workload.hidden_dim if per_token else FP8_GROUP_SIZE,
            "dtype": workload.dtype,
        }


CONTENDERS = (LowLatencyLayerContender(), LowLatencyLayerContender("ep_low_latency_traced", records_spans=True))
