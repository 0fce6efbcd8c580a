"""Runs FlashInfer's one-sided all-to-all over NVLink (TensorRT-LLM's kernels), with experts' rows in its workspace.

The library's dispatch takes cast tokens: a round trip casts them once, untimed, when it is made.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.bench.contenders import Contender, library_refusal
from ep_a2a.commands.bench.layer import PAD_ID, layer_over
from ep_a2a.commands.measure.session import InputsRoundTrip, Received
from ep_a2a.config import QuantType
from ep_a2a.managers.external.flashinfer import FlashInferOneSidedAll2AllManager, NVLinkOneSided

if TYPE_CHECKING:
    from ep_a2a.commands.measure.workload import Inputs, Workload
    from ep_a2a.testing.worker import RankContext


class FlashInferRoundTrip(InputsRoundTrip):
    """NVLinkOneSided for payloads at fixed addresses, with fixed views of what it receives and of the experts' rows.

    dispatch and combine alternate and never wait on the host. The workspace is sized for max_num_tokens; each step is
    bounded to T, as engines bound it. With an fp8 combine wire the experts' rows lie outside the workspace and are
    staged, since the cast in place would destroy them.
    """

    def __init__(self, workload: Workload, context: RankContext, inputs: Inputs | None = None) -> None:
        super().__init__(workload, context, inputs)
        self._fp8_combine = workload.combine_quant == QuantType.FP8_DIRECT_CAST
        self._step_tokens = max(1, workload.num_tokens)
        payloads = {"x": self.sent, "ids": self._ids, "weights": self._weights}
        if self.scales is not None:
            payloads["scales"] = self.scales
        self._native = NVLinkOneSided(
            {name: (each.shape[1], each.dtype) for name, each in payloads.items()},
            num_experts=workload.num_experts,
            topk=workload.topk,
            max_num_tokens=max(1, workload.max_num_tokens),
            combine_row_bytes=workload.hidden_dim * workload.dtype.itemsize,
            group=context.group,
            rank=context.rank,
            world_size=context.world_size,
        )
        self._payloads = self._native.packed(payloads)
        self._out = torch.empty_like(self._x)
        dispatched = self.dispatch()
        if self._fp8_combine:
            lead = context.world_size, self._step_tokens, workload.hidden_dim
            self._rows = torch.zeros(lead, dtype=workload.dtype, device=context.device)
        else:
            self._rows = self._native.combine_rows(self._step_tokens, workload.hidden_dim, workload.dtype).zero_()
        self.combine(dispatched)
        self.details = {
            "version": importlib.metadata.version("flashinfer-python"),
            "combine": "staged" if self._fp8_combine else "zero-copy",
            "dispatch": "tokens as they are" if self.scales is None else "tokens cast before",
        }

    def dispatch(self) -> dict[str, torch.Tensor]:
        """Sends tokens, scales, ids and router weights; returns them as received, `[W, max(T, 1), n]` by name."""
        return self._native.dispatch(self._ids, self._payloads, self._step_tokens)

    def combine(self, dispatched: Any) -> torch.Tensor:
        """Combines the experts' rows, which lie ready."""
        in_workspace = not self._fp8_combine
        return self._native.combine(
            self._rows, self._step_tokens, self._out, in_workspace=in_workspace, fp8=self._fp8_combine
        )

    def run_identity_experts(self, dispatched: dict[str, torch.Tensor]) -> None:
        """Leaves the received rows as the experts'; those past them may hold anything."""
        self._rows.copy_(self._rows_of(dispatched["x"], dispatched.get("scales")))

    def received(self, dispatched: dict[str, torch.Tensor]) -> Received:
        """Returns the received rows, after a small launch that marks the padding among the ids."""
        self._native.mark_padding(dispatched["ids"], PAD_ID)
        flat = {name: each.flatten(0, 1) for name, each in dispatched.items()}
        return Received(flat["x"], flat.get("scales"), flat["ids"], flat["weights"], self._rows.flatten(0, 1))

    def close(self) -> None:
        """Unmaps the workspace once no rank uses it. Collective."""
        self._rows = self._out
        self._native.close()


def unavailable(workload: Workload, device: torch.device) -> str | None:
    """Returns why FlashInfer cannot run this workload here; None where it can."""
    ids = torch.cat([workload.ids(rank) for rank in range(workload.world_size)])
    refusal = library_refusal(FlashInferOneSidedAll2AllManager, workload, device)
    if refusal is None and bool(((ids < 0) | (ids >= workload.num_experts)).any()):
        refusal = "sends dropped slots to rank 0"
    return refusal


CONTENDERS = (Contender("flashinfer", FlashInferRoundTrip, layer_over(FlashInferRoundTrip), unavailable),)
"""`flashinfer.comm`'s MoeAlltoAll: dispatch pushes each token once per distinct rank, combine pulls.

Rows arrive in layout rank_major in no particular order. Combine is zero-copy; with an fp8 combine wire
(fp8_direct_cast, no scales) it is staged, since the cast in place would destroy the rows.
"""
