"""Runs DeepEP V2's ElasticBuffer: tokens that are cast already, a row per distinct rank.

Results hold the most rows that can come, so the host never waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.commands.measure.session import InputsRoundTrip
from ep_a2a.managers.external.deepep import ELASTIC_BUFFER, rows_and_scales, topk_dtype

if TYPE_CHECKING:
    import torch

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext


class ElasticRoundTrip(InputsRoundTrip):
    """ElasticBuffer's dispatch and combine."""

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context)
        deep_ep = ELASTIC_BUFFER.load()
        self._ids = self._ids.to(topk_dtype(deep_ep))
        self._buffer = deep_ep.ElasticBuffer(
            group=context.group,
            num_max_tokens_per_rank=max(1, workload.max_tokens),
            hidden=workload.hidden,
            num_topk=workload.topk,
            use_fp8_dispatch=self.scales is not None,
            explicitly_destroy=True,
        )
        self.details = {"version": "V2", "dispatch": "tokens cast before, no host wait"}

    def dispatch(self) -> tuple[Any, Any]:
        """Sends tokens, scales, ids and weights; returns the received rows and the buffer's handle."""
        received, _, _, handle, _ = self._buffer.dispatch(
            self.sent if self.scales is None else (self.sent, self.scales),
            self._ids,
            self._weights,
            num_experts=self._workload.experts,
            num_sms=self._workload.max_sms,
            do_cpu_sync=False,
        )
        return received, handle

    def combine(self, dispatched: tuple[Any, Any]) -> torch.Tensor:
        """Combines the experts' rows, which lie ready."""
        result: torch.Tensor = self._buffer.combine(self._rows, handle=dispatched[1])[0]
        return result

    def run_identity_experts(self, dispatched: tuple[Any, Any]) -> None:
        """Leaves the received rows as the experts'."""
        self._rows = self._rows_of(*rows_and_scales(dispatched[0]))

    def close(self) -> None:
        """Gives the buffer back."""
        self._buffer.destroy()
