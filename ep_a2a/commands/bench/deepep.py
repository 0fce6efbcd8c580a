"""Runs DeepEP, where it is installed: V1's low-latency kernels, or V2's ElasticBuffer without host waits."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.bench.contenders import Contender, library_refusal
from ep_a2a.commands.measure.session import InputsRoundTrip
from ep_a2a.config import QuantType
from ep_a2a.managers.external.deepep import (
    ELASTIC_BUFFER,
    DeepEPLowLatencyAll2AllManager,
    DeepEPV2All2AllManager,
    low_latency_buffer,
    rows_and_scales,
    topk_dtype,
)

if TYPE_CHECKING:
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext


class _DeepEPRoundTrip(InputsRoundTrip):
    """Parts that both versions share: ids of the library's dtype, and identity experts."""

    _buffer: Any

    def __init__(self, workload: Workload, context: RankContext, *, casts_before: bool) -> None:
        super().__init__(workload, context, casts_before=casts_before)
        self._deep_ep: Any = importlib.import_module("deep_ep")
        self._ids = self._ids.to(topk_dtype(self._deep_ep))
        self._num_most = max(1, workload.max_num_tokens)

    def run_identity_experts(self, dispatched: tuple[Any, Any]) -> None:
        self._rows = self._rows_of(*rows_and_scales(dispatched[0]))

    def close(self) -> None:
        self._buffer.destroy()


class _LowLatencyRoundTrip(_DeepEPRoundTrip):
    """V1: expert-major rows `[E, W * T, H]`; combine weighs them, here by one."""

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context, casts_before=False)
        self._buffer = low_latency_buffer(
            self._deep_ep,
            context.group,
            max_num_tokens=self._num_most,
            hidden_dim=workload.hidden_dim,
            world_size=context.world_size,
            num_experts=workload.num_experts,
        )
        self._ones = torch.ones(self._ids.shape, dtype=torch.float32, device=self._ids.device)
        self.details = {"version": "V1 low-latency", "dispatch": "cast inside, a row per expert"}

    def dispatch(self) -> tuple[Any, Any]:
        use_fp8 = self._workload.quant_type != QuantType.NONE
        received, _, handle, _, _ = self._buffer.low_latency_dispatch(
            self._x, self._ids, self._num_most, self._workload.num_experts, use_fp8=use_fp8
        )
        return received, handle

    def combine(self, dispatched: tuple[Any, Any]) -> torch.Tensor:
        result: torch.Tensor = self._buffer.low_latency_combine(self._rows, self._ids, self._ones, dispatched[1])[0]
        return result

    def _copies(self) -> torch.Tensor:
        ids = self._workload.ids(self._context.rank)
        return ((ids >= 0) & (ids < self._workload.num_experts)).sum(1)


class _ElasticRoundTrip(_DeepEPRoundTrip):
    """V2: a row per distinct rank. Results hold the most rows that can come, so the host never waits."""

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__(workload, context, casts_before=True)
        self._buffer = self._deep_ep.ElasticBuffer(
            group=context.group,
            num_max_tokens_per_rank=self._num_most,
            hidden=workload.hidden_dim,
            num_topk=workload.topk,
            use_fp8_dispatch=self.scales is not None,
            explicitly_destroy=True,
        )
        self.details = {"version": "V2", "dispatch": "tokens cast before, no host wait"}

    def dispatch(self) -> tuple[Any, Any]:
        received, _, _, handle, _ = self._buffer.dispatch(
            self.sent if self.scales is None else (self.sent, self.scales),
            self._ids,
            self._weights,
            num_experts=self._workload.num_experts,
            num_sms=self._workload.max_sms,
            do_cpu_sync=False,
        )
        return received, handle

    def combine(self, dispatched: tuple[Any, Any]) -> torch.Tensor:
        result: torch.Tensor = self._buffer.combine(self._rows, handle=dispatched[1])[0]
        return result


def unavailable(workload: Workload, device: torch.device, *, low_latency: bool = False) -> str | None:
    """Returns why DeepEP cannot run this workload here; None where it can. low_latency: as `_round_trip`."""
    manager = DeepEPLowLatencyAll2AllManager if _takes_v1(low_latency) else DeepEPV2All2AllManager
    return library_refusal(manager, workload, device)


def _round_trip(workload: Workload, context: RankContext, *, low_latency: bool = False) -> _DeepEPRoundTrip:
    """Allocates the buffer among the ranks. low_latency: V1's mode also where the package has V2. Collective."""
    return (_LowLatencyRoundTrip if _takes_v1(low_latency) else _ElasticRoundTrip)(workload, context)


def _takes_v1(low_latency: bool) -> bool:
    return low_latency or ELASTIC_BUFFER.problem() is not None


CONTENDERS = (
    Contender("deepep", _round_trip, unavailable=unavailable),
    Contender(
        "deepep_low_latency",
        partial(_round_trip, low_latency=True),
        unavailable=partial(unavailable, low_latency=True),
    ),
)
"""`deep_ep`: V2 (ElasticBuffer) where the package has it, else V1's low-latency mode.

V1 casts inside dispatch, sends a row per expert and applies the router's weights in combine. V2 takes tokens that are
cast already and sends a row per rank.
"""
