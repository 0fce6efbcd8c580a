"""This package's op as a contender, in the ways that an engine can call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from ep_a2a.bench.contender import Contender, Session, check_round_trip
from ep_a2a.config import EpDispatchCombineConfig, Layout, QuantType, num_owned_experts
from ep_a2a.errors import EpA2AError
from ep_a2a.memory.arena import Arena
from ep_a2a.quantization import dequantize, quantize

if TYPE_CHECKING:
    from ep_a2a.bench.contender import BenchContext
    from ep_a2a.bench.workload import Workload
    from ep_a2a.kernels.base_op import DispatchResult

FILLED_LAYOUTS = (Layout.COMPACT, Layout.RANK_MAJOR)
"""Layouts in which `_OpSession` knows where the received rows lie."""


class OpContender(Contender):
    """The op as an engine calls it: casts inside dispatch, experts that write where combine sends from (zero copy).

    Attributes:
        bounds_step: dispatch is told that no rank brings more than T tokens, instead of M.
        casts_before: tokens come cast to fp8 already, as the other libraries want them.
        stages: experts write elsewhere, so that combine copies first.
    """

    name: ClassVar[str] = "ep_a2a"
    bounds_step: ClassVar[bool] = False
    casts_before: ClassVar[bool] = False
    stages: ClassVar[bool] = False

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """What the op refuses by its config, and variants that would be `ep_a2a` itself."""
        if workload.layout not in FILLED_LAYOUTS:
            return f"its experts' rows are filled in for layouts {', '.join(FILLED_LAYOUTS)} only"
        if self.bounds_step and workload.max_num_tokens == workload.num_tokens:
            return "the same as ep_a2a where max_num_tokens is num_tokens"
        if self.casts_before and workload.quant_type == QuantType.NONE:
            return "the same as ep_a2a without a cast"
        try:
            make_config(workload, 0)
        except EpA2AError as error:
            return str(error)
        return None

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Builds the op. Collective."""
        return _OpSession(workload, context, self)


class BoundedOpContender(OpContender):
    """`ep_a2a` with max_num_tokens=T at each step, where buffers are made for more."""

    name = "ep_a2a_bounded"
    bounds_step = True


class PrecastOpContender(OpContender):
    """`ep_a2a` with tokens that were cast to fp8 before dispatch."""

    name = "ep_a2a_precast"
    casts_before = True


class StagedOpContender(OpContender):
    """`ep_a2a` without zero copy."""

    name = "ep_a2a_staged"
    stages = True


def make_config(workload: Workload, rank: int) -> EpDispatchCombineConfig:
    """The op's config for a workload.

    Raises:
        ConfigError: no op can have it.
    """
    has_combine_cast = workload.combine_quant != QuantType.NONE
    return EpDispatchCombineConfig(
        data_type=workload.dtype,
        rank=rank,
        world_size=workload.world_size,
        hidden_dim=workload.hidden_dim,
        scale_dim=0,
        scale_type_size=0,
        max_token_type_size=workload.dtype.itemsize,
        max_num_inp_token_per_rank=workload.max_num_tokens,
        num_experts_per_rank=num_owned_experts(workload.num_experts, workload.world_size, rank),
        num_experts_per_token=workload.topk,
        num_experts=workload.num_experts,
        quant_type=workload.combine_quant if has_combine_cast else workload.quant_type,
        dispatch_quant_type=workload.quant_type if has_combine_cast else None,
        layout=workload.layout,
        max_sms=workload.max_sms,
    )


class _OpSession(Session):
    def __init__(self, workload: Workload, context: BenchContext, contender: OpContender) -> None:
        from ep_a2a.kernels.op import EpDispatchCombineOp

        super().__init__()
        self._workload, self._name = workload, contender.name
        inputs = workload.inputs(context.rank, context.device)
        self._x, self._ids, self._weights = inputs.x, inputs.ids, inputs.weights
        self._copies = workload.num_distinct_ranks(context.rank)
        self._sent, self._scales = self._x, None
        if contender.casts_before:
            self._sent, self._scales = quantize(self._x, workload.quant_type)
        self._step_bound = workload.num_tokens if contender.bounds_step else None
        self._arena = Arena(context.group, context.device)
        try:
            self._op = EpDispatchCombineOp(make_config(workload, context.rank), arena=self._arena)
        except Exception:
            self._arena.close()
            raise
        num_rows = self._op.num_rows(self._step_bound or workload.max_num_tokens)
        self._rows = self._op.get_registered_combine_input_buffer(workload.dtype)
        if contender.stages:
            self._rows = torch.zeros_like(self._rows[:num_rows])
        self._lead: tuple[int, ...] = (num_rows,)
        if workload.layout == Layout.RANK_MAJOR:
            self._lead = (workload.world_size, num_rows // workload.world_size)
        if contender.stages:
            self._rows = self._rows.view(*self._lead, workload.hidden_dim)
        for is_dispatch, phase in ((True, "dispatch"), (False, "combine")):
            launch = self._op.get_launch_config(is_dispatch)
            self.details[f"{phase}_programs"], self.details[f"{phase}_warps"] = launch[0], launch[2]
        # The experts' part, which is not timed: dispatch gives the same rows every time, so they stay right.
        dispatched = self.dispatch()
        self._run_identity_experts(dispatched)
        self.combine(dispatched)

    def dispatch(self) -> DispatchResult:
        """Tokens, ids and router weights to the experts' ranks."""
        return self._op.dispatch(
            self._sent, self._weights, self._scales, self._ids, max_num_tokens=self._step_bound
        )  # fmt: skip

    def combine(self, dispatched: DispatchResult) -> torch.Tensor:
        """The experts' rows, which lie ready."""
        result, _ = self._op.combine(self._rows, None, None)
        return result[: self._workload.num_tokens]

    def check(self) -> None:
        """A round trip on the rows that will be timed, and the ids and router weights that came with them."""
        result = self.combine(self.dispatch())
        check_round_trip(self._name, self._workload, self._x, self._copies, result)
        self._op.check()

    def close(self) -> None:
        """Closes the op and gives its memory back."""
        self._op.close()
        del self._rows
        self._arena.close()

    def _run_identity_experts(self, dispatched: DispatchResult) -> None:
        """Each received row becomes the row to combine; rows past the received ones stay as they are."""
        tokens, _, scales, _, _ = dispatched
        targets = self._rows.view(-1, self._workload.hidden_dim)
        counts = self._op.recv_counts.tolist()
        if self._workload.layout == Layout.RANK_MAJOR:
            spans = [(source * self._lead[1], count) for source, count in enumerate(counts)]
        else:
            spans = [(0, sum(counts))]
        flat_tokens = tokens.view(-1, self._workload.hidden_dim)
        for start, count in spans:
            rows = flat_tokens[start : start + count]
            if scales is not None:
                flat_scales = scales.view(-1, scales.shape[-1])[start : start + count]
                rows = dequantize(rows, flat_scales, self._workload.quant_type, self._workload.dtype)
            targets[start : start + count] = rows
