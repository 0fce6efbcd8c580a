"""Runs what others move tokens with: torch.distributed's collectives, FlashInfer, DeepEP V2.

Libraries are called below their managers' ops, whose conversions would count as the libraries' time. Their dispatch
takes cast tokens, which a round trip casts once, untimed, when it is made.
"""

import contextlib
import importlib.metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ep_a2a.commands.measure.session import InputsRoundTrip, Received
from ep_a2a.commands.measure.workload import Inputs, Workload
from ep_a2a.config import QuantType
from ep_a2a.managers.external.deepep import ELASTIC_BUFFER, rows_and_scales, topk_dtype
from ep_a2a.managers.external.flashinfer import NVLinkOneSided, wire_view
from ep_a2a.routing import destination_mask
from ep_a2a.testing.worker import RankContext

# torch 2.13 renamed the functions and warns on every use of the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGatherRoundTrip(InputsRoundTrip):
    """vLLM's default: all-gather of what a token has; reduce-scatter of all ranks' rows in the tokens' dtype."""

    def __init__(self, workload: Workload, context: RankContext, inputs: Inputs | None = None) -> None:
        super().__init__(workload, context, inputs)
        if workload.combine_quant != QuantType.NONE:
            self.details = {"combine": "unquantised"}
        # Tokens travel as bytes: NCCL knows no sum of fp8, and some versions do not know the type.
        scales = [] if self.scales is None else [self.scales]
        self._parts = [self.sent.view(torch.uint8), self._ids, self._weights, *scales]
        num_rows = sum(workload.counts)
        self._gathered = [part.new_empty(num_rows, part.shape[1]) for part in self._parts]
        self._result = torch.empty_like(self._x)
        self._rows = self._x.new_zeros(num_rows, workload.hidden)

    def dispatch(self) -> Received:
        """Gathers what all ranks' tokens have, on a GPU as one group of all-gathers."""
        group, device = self._context.group, self._context.device
        together: Any = contextlib.nullcontext()
        if device.type != "cpu" and not self._workload.uneven:
            together = distributed_c10d._coalescing_manager(group=group, device=device, async_ops=False)
        with together:
            for whole, part in zip(self._gathered, self._parts, strict=True):
                if not self._workload.uneven:
                    _all_gather_single(whole, part, group=group)
                else:
                    gather_unequal(list(torch.split(whole, list(self._workload.counts))), part, self._context)
        tokens, ids, weights, *scales = self._gathered
        return Received(tokens.view(self.sent.dtype), scales[0] if scales else None, ids, weights, self._rows)

    def combine(self, dispatched: Received) -> torch.Tensor:
        """Sums the ranks' rows for this rank's tokens."""
        if not self._workload.uneven:
            _reduce_scatter_single(self._result, self._rows, group=self._context.group)
        else:
            sum_unequal(self._result, list(torch.split(self._rows, list(self._workload.counts))), self._context)
        return self._result

    def run_identity_experts(self, dispatched: Received) -> None:
        """Leaves the rows of this rank's experts, and zeros for all others."""
        rows = self._rows_of(dispatched.rows, dispatched.scales)
        owned = destination_mask(dispatched.ids, self._workload.experts, self._workload.ranks)
        mine = owned[:, self._context.rank, None]
        self._rows.copy_(torch.where(mine, rows, torch.zeros_like(rows)))


def gather_unequal(parts: list[torch.Tensor], own: torch.Tensor, context: RankContext) -> None:
    """Fills the parts with all ranks' own tensors, of unequal lengths; NCCL broadcasts them in a group, as in vLLM."""
    if context.device.type == "cuda":
        dist.all_gather(parts, own, group=context.group)
        return
    parts[context.rank].copy_(own)
    for source, part in enumerate(parts):
        dist.broadcast(part, group=context.group, group_src=source)


def sum_unequal(result: torch.Tensor, parts: list[torch.Tensor], context: RankContext) -> None:
    """Sums this rank's part over all ranks; NCCL reduces all parts in a group, as in vLLM. gloo changes the parts."""
    if context.device.type == "cuda":
        dist.reduce_scatter(result, parts, group=context.group)
        return
    parts[context.rank] = result.copy_(parts[context.rank])
    for target, part in enumerate(parts):
        dist.reduce(part, group=context.group, group_dst=target)


class FlashInferRoundTrip(InputsRoundTrip):
    """FlashInfer's one-sided all-to-all over NVLink (TensorRT-LLM's kernels), for payloads at fixed addresses.

    dispatch and combine alternate and never wait on the host. Each step is bounded to T, as engines bound
    it. With an fp8 combine wire the experts' rows lie outside the workspace and are
    staged, since the cast in place would destroy them.
    """

    def __init__(self, workload: Workload, context: RankContext, inputs: Inputs | None = None) -> None:
        super().__init__(workload, context, inputs)
        self._fp8_combine = workload.combine_quant == QuantType.FP8_DIRECT_CAST
        payloads = [each for each in (self.sent, self.scales, self._ids, self._weights) if each is not None]
        self._native = NVLinkOneSided(
            hidden_dim=workload.hidden,
            dtype=torch.bfloat16,
            payload_bytes=sum(each.shape[1] * each.itemsize for each in payloads),
            num_experts=workload.experts,
            topk=workload.topk,
            max_tokens=workload.tokens,
            group=context.group,
            fp8_combine=self._fp8_combine,
        )
        self._wire_scales = None if self.scales is None else wire_view(self.scales)
        self._out = torch.empty_like(self._x)
        dispatched = self.dispatch()
        rows = self._native.combine_rows(torch.bfloat16)
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
            wire_view(self.sent), self._ids, self._weights, self._wire_scales, self._workload.tokens
        )
        scales = None if self.scales is None else got.hidden_states_scale.view(self.scales.dtype)
        return Received(got.hidden_states.view(self.sent.dtype), scales, got.topk_ids, got.topk_weights, self._rows)

    def combine(self, dispatched: Any) -> torch.Tensor:
        """Combines the experts' rows, which lie ready."""
        # The class reads those in place that it was asked for in this step.
        rows = self._rows if self._fp8_combine else self._native.combine_rows(torch.bfloat16)
        self._native.combine(rows, self._out)
        return self._out

    def run_identity_experts(self, dispatched: Received) -> None:
        """Leaves the received rows as the experts'; those past them may hold anything."""
        self._rows.copy_(self._rows_of(dispatched.rows, dispatched.scales))

    def close(self) -> None:
        """Gives the workspace back once no rank uses it. Collective."""
        self._rows = self._out
        self._native.close()


class ElasticRoundTrip(InputsRoundTrip):
    """DeepEP V2's ElasticBuffer: a row per distinct rank, results for the most rows that can come, no host wait."""

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context)
        deep_ep = ELASTIC_BUFFER.load()
        self._ids = self._ids.to(topk_dtype(deep_ep))
        self._buffer = deep_ep.ElasticBuffer(
            group=context.group,
            num_max_tokens_per_rank=workload.tokens,
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
