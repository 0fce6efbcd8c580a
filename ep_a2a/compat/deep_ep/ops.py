"""The ops of a buffer, each made by the first call of its shape, and their open steps.

DeepEP's calls come in any order, while dispatch and combine of an op alternate. An op's step is open from its dispatch
to its combine. A buffer keeps up to `max_open_steps` open, each on memory of its own index. All ranks make the same
calls in the same order, so they decide alike without communication.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.config import FP8_DTYPE, CompiledCalls, EpDispatchCombineConfig, Layout, QuantType, ScaleFormat
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import ConfigError, EpA2AError, StateError, TooManyTokensError, max_tokens_named
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.memory.guards import outside_modes
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.ops.factory import OpFactory
from ep_a2a.ops.op import EpDispatchCombineOp
from ep_a2a.topology import Topology

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpShape:
    """The key of a buffer's ops.

    Attributes:
        dtype: of the tokens that are given to dispatch.
        hidden_dim, topk, num_experts: sizes. max_tokens: M.
        layout: of the received rows.
        num_scales, scale_bytes: of tokens that are quantised already; 0 = none.
        scale_format: of the scales that a cast inside dispatch writes, one per 128 elements; None = no cast.
    """

    dtype: torch.dtype
    hidden_dim: int
    topk: int
    num_experts: int
    max_tokens: int
    layout: Layout
    num_scales: int = 0
    scale_bytes: int = 0
    scale_format: ScaleFormat | None = None


class Ops(NativeAll2AllManager):
    """A manager that keeps its ops, by shape and memory index. Construction is collective.

    Args:
        group: the ranks; any backend.
        device: where tokens are; None = the current CUDA device, or CPU without one.
        max_tokens: the most tokens of any rank, equal on all ranks; 0 = not known.
        gpus_per_node: None goes by the ranks' hosts; a number cuts virtual nodes of that many ranks.

    Attributes:
        nodes: those of the group.

    Raises:
        ConfigError: gpus_per_node would put ranks of two hosts on one node.
        UnsupportedError: nodes differ in their number of ranks, or their ranks do not follow one another.
        ConfigMismatchError: another rank has raised one of these.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str | None,
        max_tokens: int,
        gpus_per_node: int | None = None,
    ) -> None:
        self._max_tokens = checked_integer("max_num_tokens_per_rank", max_tokens, 0)
        backends = dist.get_backend_config(group)
        has_gloo = "cpu:gloo" in backends
        self._own_group = None if has_gloo else make_subgroup(group, range(dist.get_world_size(group)))
        super().__init__(self._own_group or group)
        self.device_group = group if "cuda:nccl" in backends else None
        if device is not None:
            self.device = torch.device(device)
        self._ops: dict[tuple[OpShape, int], EpDispatchCombineOp] = {}
        self._num_sms: dict[EpDispatchCombineOp, int] = {}
        try:
            self.nodes = self._rendezvous.attempt("finding the nodes", lambda: self._find_nodes(gpus_per_node))
        except EpA2AError:
            self.close()
            raise

    def _find_nodes(self, gpus_per_node: int | None) -> Topology:
        try:
            topology = self.topology(gpus_per_node)
        except ConfigError as error:
            error.field = "gpus_per_node"
            raise
        NodeGrid.of(topology, self.rank)
        return topology

    def _make_op(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> EpDispatchCombineOp:
        """Returns an op that by expert may take weights in combine, as DeepEP's, which weighs at the token's rank."""
        if self._factory is None:
            self._factory = OpFactory(self.arena, CombineTimeWeightsOp)
        return super()._make_op(config, topology, index)

    def max_tokens_for(self, step_tokens: int) -> int:
        """Returns M of the op for a step.

        Args:
            step_tokens: the most tokens of any rank, equal on all ranks.

        Raises:
            TooManyTokensError: more than the bound that the buffer was given.
        """
        if not self._max_tokens:
            return 1 << (step_tokens - 1).bit_length()  # powers of two: few ops are made while batches grow
        if step_tokens > self._max_tokens:
            raise TooManyTokensError(
                f"at most {self._max_tokens} tokens on any rank (max_num_tokens_per_rank)",
                str(step_tokens),
                "Raise max_num_tokens_per_rank of the buffer on every rank, or leave it out.",
            )
        return self._max_tokens

    def get(self, shape: OpShape, index: int) -> EpDispatchCombineOp:
        """Returns the op of this shape on the memory of this index. Collective when it is new."""
        return self._ops[shape, index] if (shape, index) in self._ops else self._new(shape, index)

    @outside_modes()
    def _new(self, shape: OpShape, index: int) -> EpDispatchCombineOp:
        by_expert = shape.layout is Layout.EXPERT_MAJOR
        with max_tokens_named("num_max_dispatch_tokens_per_rank" if by_expert else "max_num_tokens_per_rank"):
            op: EpDispatchCombineOp = self.get_handle(self._handle_kwargs(shape), index)
        self._ops[shape, index] = op
        return op

    def _handle_kwargs(self, shape: OpShape) -> dict[str, Any]:
        is_cast = shape.dtype == FP8_DTYPE
        casts = shape.scale_format is not None
        return {
            "rank": self.rank,
            "num_ep_ranks": self.world_size,
            "gpu_per_node": self.nodes.gpu_per_node,
            # the dtype of combine's rows; DeepEP combines bf16 rows if tokens travel as fp8
            "input_dtype": torch.bfloat16 if is_cast else shape.dtype,
            "quant_dtype": FP8_DTYPE if is_cast or casts else shape.dtype,
            "token_hidden_size": shape.hidden_dim,
            "scale_dim": shape.num_scales,
            "scale_type_size": shape.scale_bytes,
            "max_num_tokens_per_dp_rank": shape.max_tokens,
            "num_local_experts": shape.num_experts // self.world_size,
            "num_experts_per_token": shape.topk,
            "layout": shape.layout.value,
            "local_ids": True,
            "column_major_scales": casts and shape.layout is Layout.EXPERT_MAJOR,
            "quant_type": QuantType.FP8_PER_1X128.value if casts else QuantType.NONE.value,
            "scale_format": (shape.scale_format or ScaleFormat.FLOAT32).value,
            # low-latency calls need few of the compiled kernels
            "compiled_calls": (CompiledCalls.ALL if shape.layout is Layout.COMPACT else CompiledCalls.SERVING).value,
        }

    def limit_sms(self, op: EpDispatchCombineOp, num_sms: int) -> None:
        """Bounds the multiprocessors of an op's launches from now on; 0 = all."""
        if self._num_sms.get(op, 0) != num_sms:
            op.set_max_sms(num_sms)
            self._num_sms[op] = num_sms

    def close(self) -> None:
        """Frees all memory. Local; must be called on every rank. A second call does nothing."""
        self._ops.clear()
        self._num_sms.clear()
        # garbage collection may call this, at another time on every rank: do not wait for the others
        self.destroy(alone=True)
        if self._own_group is not None:
            destroy_subgroup(self._own_group)
            self._own_group = None


class Hook:
    """DeepEP's hook of `return_recv_hook`: the first call receives, later calls do nothing.

    The half is launched on the stream that was current when the hook was made, that of the sending half, as DeepEP's.

    Args:
        receive: launches the receiving half.
        device: of the op's memory.

    Attributes:
        is_done: whether `receive` has been called.
    """

    def __init__(self, receive: Callable[[], object], device: torch.device) -> None:
        self._receive = receive
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.is_done = False
        self._is_displaced = False

    @outside_graphs
    def __call__(self) -> None:
        """Receives. Raises StateError if another dispatch has taken the memory."""
        if self._is_displaced:
            raise StateError(
                "the hook to be called before its memory is needed again",
                "a call after that",
                "Call the hook before as many further dispatches as the buffer keeps open (max_open_steps).",
            )
        self.finish()

    def finish(self) -> None:
        """Receives, unless it has been done."""
        if not self.is_done:
            self.is_done = True
            with torch.cuda.stream(self._stream):  # None changes nothing
                self._receive()

    def displace(self) -> None:
        """Receives because the op's memory is needed. The rows will be overwritten, so a later call raises."""
        if not self.is_done:
            self.finish()
            self._is_displaced = True


class Step:
    """The open step of an op, once its dispatch has been launched.

    Attributes:
        op: the op. index: that of its memory.
        record: the op's of the step.
        is_displaced: whether it was ended unasked, before its combine.
        dispatch_hook, combine_hook: the receiving halves of split calls.
    """

    def __init__(self, op: EpDispatchCombineOp, index: int) -> None:
        assert op.open_step is not None
        self.op, self.index, self.record = op, index, op.open_step
        self.is_displaced = False
        self.dispatch_hook: Hook | None = None
        self.combine_hook: Hook | None = None

    @property
    def is_open(self) -> bool:
        """Whether the op still holds this dispatch."""
        return self.op.open_step is self.record

    @property
    def rows_shape(self) -> torch.Size:
        """Shape of the rows that its combine takes."""
        return self.record.dispatched.tokens.shape

    def displace(self) -> None:
        """Ends the op's step to free its memory: finishes a combine that has begun, else combines zeros."""
        if not self.is_open:
            return
        if self.combine_hook is not None:
            self.combine_hook.finish()
            return
        logger.info("a dispatch is combined unasked, because its memory is needed for another one")
        if self.dispatch_hook is not None:
            self.dispatch_hook.displace()
        config = self.op.config
        rows = torch.zeros(self.rows_shape, dtype=config.combined_dtype, device=self.op.device)
        self.op.combine(rows, None, None)
        self.is_displaced = True


class Handle:
    """A dispatch that a combine, or another dispatch, refers to.

    Attributes:
        ids: int32 [T, K], the ids that the op routes by.
        step_tokens: the most tokens of any rank, equal on all.
        shape: that of the op that holds, or last held, the dispatch. step: that dispatch.
    """

    ids: torch.Tensor
    step_tokens: int
    shape: OpShape
    step: Step


class Steps:
    """The open steps of a buffer.

    Args:
        max_open_steps: how many; 1 at least.
    """

    def __init__(self, max_open_steps: int) -> None:
        self.max_open_steps = checked_integer("max_open_steps", max_open_steps, 1)
        self._steps: list[Step] = []
        self._newest_rows: dict[int, Step] = {}

    def free_index(self) -> int:
        """Returns the lowest memory index without an open step. If there is none, displaces the oldest step."""
        self._steps = [step for step in self._steps if step.is_open]
        if len(self._steps) == self.max_open_steps:
            self._steps.pop(0).displace()
        used = {step.index for step in self._steps}
        return next(index for index in range(self.max_open_steps) if index not in used)

    def add(self, step: Step, *, keeps_rows: bool) -> None:
        """Adds a dispatch that has been launched.

        Args:
            step: of the dispatch.
            keeps_rows: whether the caller reads the received rows in the memory of the step's index, as in low-latency
                mode. All ops of an index keep them in the same memory.
        """
        self._steps.append(step)
        if keeps_rows:
            self._newest_rows[step.index] = step

    def expect_rows(self, step: Step) -> None:
        """Checks that no later dispatch has overwritten a step's rows before the step's combine.

        Raises:
            StateError: one has. Nobody knows whether the experts had read the rows by then.
        """
        if step.is_displaced and self._newest_rows[step.index] is not step:
            raise StateError(
                f"at most {self.max_open_steps} dispatches to wait for their combine (max_open_steps)",
                "the combine of one whose rows a later dispatch has overwritten",
                "Combine it earlier, or create the Buffer with a larger max_open_steps on every rank.",
            )

    def clear(self) -> None:
        """Removes all steps; their ops must be closed."""
        self._steps.clear()
        self._newest_rows.clear()
