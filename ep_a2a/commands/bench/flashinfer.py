"""Runs FlashInfer's one-sided all-to-all over NVLink (TensorRT-LLM's kernels), with experts' rows in its workspace.

The library's dispatch takes cast tokens: a round trip casts them once, untimed, when it is made. It marks padding in a
launch of its own.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.measure.session import InputsRoundTrip, Received
from ep_a2a.config import QuantType
from ep_a2a.managers.external.flashinfer import NVLinkOneSided, wire_view

if TYPE_CHECKING:
    from ep_a2a.commands.measure.workload import Inputs, Workload
    from ep_a2a.testing.worker import RankContext


class FlashInferRoundTrip(InputsRoundTrip):
    """NVLinkOneSided for payloads at fixed addresses, with fixed views of what it receives and of the experts' rows.

    dispatch and combine alternate and never wait on the host. The workspace is sized for max_tokens; each step is
    bounded to T, as engines bound it. With an fp8 combine wire the experts' rows lie outside the workspace and are
    staged, since the cast in place would destroy them.
    """

    def __init__(self, workload: Workload, context: RankContext, inputs: Inputs | None = None) -> None:
        super().__init__(workload, context, inputs)
        self._fp8_combine = workload.combine_quant == QuantType.FP8_DIRECT_CAST
        self._step_tokens = max(1, workload.tokens)
        payloads = [each for each in (self.sent, self.scales, self._ids, self._weights) if each is not None]
        self._native = NVLinkOneSided(
            hidden_dim=workload.hidden,
            dtype=workload.dtype,
            payload_bytes=sum(each.shape[1] * each.itemsize for each in payloads),
            num_experts=workload.experts,
            topk=workload.topk,
            max_tokens=max(1, workload.max_tokens),
            group=context.group,
            fp8_combine=self._fp8_combine,
        )
        self._wire_scales = None if self.scales is None else wire_view(self.scales)
        self._out = torch.empty_like(self._x)
        dispatched = self.dispatch()
        rows = self._native.combine_rows(workload.dtype)
        self._rows = torch.zeros_like(rows) if self._fp8_combine else rows.zero_()
        self.combine(dispatched)
        self.details = {
            "version": importlib.metadata.version("flashinfer-python"),
            "combine": "staged" if self._fp8_combine else "zero-copy",
            "dispatch": "tokens as they are" if self.scales is None else "tokens cast before",
        }

    def dispatch(self) -> Received:
        """Sends tokens, scales, ids and router weights; returns them as received, with ids of -1 in the padding."""
        got = self._native.dispatch(
            wire_view(self.sent), self._ids, self._weights, self._wire_scales, self._step_tokens
        )
        scales = None if self.scales is None else got.hidden_states_scale.view(self.scales.dtype)
        return Received(got.hidden_states.view(self.sent.dtype), scales, got.topk_ids, got.topk_weights, self._rows)

    def combine(self, dispatched: Any) -> torch.Tensor:
        """Combines the experts' rows, which lie ready."""
        # The class reads those in place that it was asked for in this step.
        rows = self._rows if self._fp8_combine else self._native.combine_rows(self._workload.dtype)
        self._native.combine(rows, self._out)
        return self._out

    def run_identity_experts(self, dispatched: Received) -> None:
        """Leaves the received rows as the experts'; those past them may hold anything."""
        self._rows.copy_(self._rows_of(dispatched.rows, dispatched.scales))

    def received(self, dispatched: Received) -> Received:
        """Returns what dispatch returned."""
        return dispatched

    def close(self) -> None:
        """Gives the workspace back once no rank uses it. Collective."""
        self._rows = self._out
        self._native.close()
