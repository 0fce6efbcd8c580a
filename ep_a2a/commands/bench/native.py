"""Runs this package's op as a contender, in the ways that an engine can call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ep_a2a.commands.bench.contenders import NATIVE, Contender, InputsSession, Session
from ep_a2a.config import (
    CompiledCalls,
    EpDispatchCombineConfig,
    EpDispatchCombineKernelType,
    Layout,
    QuantType,
    num_owned_experts,
)
from ep_a2a.config.enums import inter_node_kernel
from ep_a2a.errors import EpA2AError, without_section
from ep_a2a.memory.arena import Arena
from ep_a2a.quantization import dequantize, quantize

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.interface import DispatchResult
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.testing.worker import RankContext
    from ep_a2a.tuning.tables import TunedTables


class OpSession(InputsSession):
    """The op with one workload's inputs.

    Attributes:
        op: the op.
    """

    def __init__(self, workload: Workload, context: RankContext, contender: OpContender) -> None:
        super().__init__(workload, context, contender)
        self._sent, self._scales = self._x, None
        if contender.casts_before:
            self._sent, self._scales = quantize(self._x, workload.quant_type)
        self._step_bound = workload.num_tokens if contender.bounds_step else None
        self._arena = Arena(context.group, context.device)
        try:
            self.op = self._make_op(make_config(workload, context.rank, contender), context)
        except Exception:
            self._arena.close()
            raise
        if not self.op.config.uses_rings:
            for is_dispatch, phase in ((True, "dispatch"), (False, "combine")):
                launch = self.op.get_launch_config(is_dispatch)
                self.details[f"{phase}_programs"], self.details[f"{phase}_warps"] = launch[0], launch[2]
        # The experts' part is not timed. Every dispatch gives the same rows, so the experts' rows stay right.
        dispatched = self.dispatch()
        self._rows = self._run_identity_experts(dispatched)
        self.combine(dispatched)

    def dispatch(self) -> DispatchResult:
        """Sends tokens, ids and router weights to the experts' ranks."""
        return self.op.dispatch(self._sent, self._weights, self._scales, self._ids, max_num_tokens=self._step_bound)

    def combine(self, dispatched: DispatchResult) -> torch.Tensor:
        """Combines the experts' rows, which lie ready."""
        result, _ = self.op.combine(self._rows, None, None)
        return result[: self._workload.num_tokens]

    def use_tables(self, tables: TunedTables) -> None:
        """Takes the launch numbers of later calls from these tables; new kernels are compiled at their first use."""
        self.op.engine.use_tables(tables)

    def check(self) -> None:
        """Checks a round trip on the rows that will be timed, and the ids and router weights that came with them."""
        super().check()
        self.op.check()

    def _copies(self) -> torch.Tensor:
        weighs = self._workload.layout == Layout.EXPERT_MAJOR
        return self._workload.valid_weights(self._context.rank) if weighs else super()._copies()

    def check_timed(self) -> None:
        """Checks that no kernel has recorded a failure."""
        self.op.check()

    def close(self) -> None:
        """Closes the op and gives its memory back."""
        self.op.close()
        self._arena.close()

    def _make_op(self, config: EpDispatchCombineConfig, context: RankContext) -> EpDispatchCombineOp:
        """Returns the op, in this session's arena. Collective."""
        from ep_a2a.ops.op import EpDispatchCombineOp

        return EpDispatchCombineOp(config, arena=self._arena)

    def _run_identity_experts(self, dispatched: DispatchResult) -> torch.Tensor:
        tokens, _, scales, _, _ = dispatched
        layout = self._workload.layout
        counts = self.op.expert_recv_count if layout == Layout.EXPERT_MAJOR else self.op.recv_counts
        if layout == Layout.COMPACT:
            counts = counts.sum(0, keepdim=True)
        return identity_experts(self._workload, tokens, scales, counts)


@dataclass
class OpContender(Contender):
    """The op as an engine calls it: casts inside dispatch, experts whose rows lie in memory of their own.

    Attributes:
        bounds_step: dispatch gets max_num_tokens=T instead of M.
        casts_before: tokens are cast to fp8 before dispatch, as the other libraries want them.
        kernel_type, internode_transport: of the op's config, on several nodes; None leaves the kernel to the policy.
    """

    name: str = NATIVE
    session: Callable[..., Session] = OpSession
    bounds_step: bool = False
    casts_before: bool = False
    kernel_type: EpDispatchCombineKernelType | None = None
    internode_transport: str = "auto"

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """Returns why the op's config refuses the workload, or that the variant would be `ep_a2a` itself."""
        if self.bounds_step and workload.max_num_tokens == workload.num_tokens:
            return "the same as ep_a2a where max_num_tokens is num_tokens"
        if self.casts_before and workload.quant_type == QuantType.NONE:
            return "the same as ep_a2a without a cast"
        try:
            make_config(workload, 0, self)
        except EpA2AError as error:
            return without_section(str(error))
        return None


CONTENDERS = (
    OpContender(),
    OpContender("ep_a2a_bounded", bounds_step=True),
    OpContender("ep_a2a_precast", casts_before=True),
)


def make_config(workload: Workload, rank: int, contender: OpContender | None = None) -> EpDispatchCombineConfig:
    """Returns the op's config for a workload; of the contender `ep_a2a` by default.

    Raises:
        ConfigError: no op can have it.
    """
    contender = contender or CONTENDERS[0]
    kernel_type = EpDispatchCombineKernelType.IntraNode
    if workload.num_nodes > 1:
        kernel_type = contender.kernel_type or inter_node_kernel(workload.max_num_tokens)
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
        # The bench makes only these calls. Each further form takes seconds to compile.
        compiled_calls=CompiledCalls.SERVING,
        layout=workload.layout,
        max_sms=workload.max_sms,
        kernel_type=kernel_type,
        gpu_per_node=workload.world_size // workload.num_nodes,
        internode_transport=contender.internode_transport,
    )


def identity_experts(
    workload: Workload, tokens: torch.Tensor, scales: torch.Tensor | None, counts: torch.Tensor
) -> torch.Tensor:
    """Returns each received row as a row to combine; NaN where none was received.

    Args:
        workload: gives the cast and the dtype of the result.
        tokens: [..., R, H], in blocks of R rows that are dense from the front. scales: [..., R, S], or None.
        counts: rows of each block. Synchronises.
    """
    # NaN, so that the check finds a combine that reads rows which were not received.
    results = torch.full(tokens.shape, float("nan"), dtype=workload.dtype, device=tokens.device)
    flat_tokens, flat_results = tokens.view(-1, workload.hidden_dim), results.view(-1, workload.hidden_dim)
    num_rows = tokens.shape[-2]
    for block, count in enumerate(counts.tolist()):
        span = slice(block * num_rows, block * num_rows + count)
        rows = flat_tokens[span]
        if scales is not None:
            flat_scales = scales.view(-1, scales.shape[-1])[span]
            rows = dequantize(rows, flat_scales, workload.quant_type, workload.dtype)
        flat_results[span] = rows
    return results
