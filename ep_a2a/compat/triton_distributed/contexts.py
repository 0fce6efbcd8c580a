"""The layer's two sets of buffers, each an op; the contexts, which know which set comes next; a dispatch's record."""

from __future__ import annotations

import functools
from typing import cast

import torch

from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.compat.expert_row_sources import expert_row_sources
from ep_a2a.compat.parameters import remedy_of
from ep_a2a.compat.triton_distributed.utils import world_arena
from ep_a2a.config import FP8_DTYPE, FP8_GROUP_SIZE, EpDispatchCombineConfig, Layout, QuantType, num_owned_experts
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.config.enums import inter_node_kernel
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import ConfigError, InputError, UnsupportedError, max_tokens_named
from ep_a2a.memory.arena import Arena
from ep_a2a.ops.arguments import Step
from ep_a2a.ops.factory import OpFactory
from ep_a2a.ops.inputs import check_rows, check_tensor, in_int32
from ep_a2a.quantization import quantize_groups
from ep_a2a.topology import Topology, classify, gather_report

NUM_PHASES = 2
SCALE_BYTES = 4
WIDEST_ELEMENT_BYTES = 4


class PhaseBuffers:
    """One op with its own memory, so that steps of both phases may be open at once.

    Args:
        op: the op.
        cast_group: elements that share a scale in a cast that torch makes before dispatch; 0 = none.

    Attributes:
        op: as given.
    """

    def __init__(self, op: CombineTimeWeightsOp, cast_group: int) -> None:
        self.op = op
        self._cast_group = cast_group
        self._num_users = 2

    def dispatch(
        self, tokens: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, DispatchMetaInfo]:
        """Returns the op's rows [E, W * M, H], scales [E, W * M, S] or None, and the record of this dispatch."""
        if self._cast_group and scales is None:
            tokens, scales = self._cast(tokens)
        rows, _, row_scales, _, _ = self.op.dispatch(tokens, weights, scales, in_int32(ids))
        return rows, row_scales, DispatchMetaInfo(self, self.op.open_step)

    def _cast(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        check_tensor("send_tokens", tokens, (self.op.config.combined_dtype,), self.op.device)
        check_rows("send_tokens", tokens, self.op.config.hidden_dim)
        groups = tokens.view(tokens.shape[0], self.op.config.num_scales, self._cast_group)
        rows, scales = quantize_groups(groups)
        return rows.flatten(1), scales

    def release(self) -> None:
        """Ends the use by one of the layer's two contexts; the second call closes the op."""
        self._num_users -= 1
        if self._num_users == 0:
            self.op.close()


class DispatchMetaInfo:
    """Identifies a dispatch for its combine, and computes the sources of its rows.

    Combine does not need the tensors, so the first access of either computes both. It must come before the combine of
    this dispatch, which gives the op's memory to the next one. Later accesses return the same tensors.

    Attributes:
        buffers: those of the dispatch's phase. step: the op's record of the dispatch.
    """

    def __init__(self, buffers: PhaseBuffers, step: Step | None) -> None:
        self.buffers, self.step = buffers, step

    @property
    def recv_token_source_indices(self) -> torch.Tensor:
        """The token at its source rank of each received row: int32 [num_experts_per_rank, world_size * max_m].

        Entries past an expert's rows are -1.

        Raises:
            StateError: the dispatch has been combined.
        """
        return self._sources[0]

    @property
    def recv_token_source_count_and_start(self) -> torch.Tensor:
        """Position and number of an expert's rows from each source: int64 [num_experts_per_rank, world_size].

        The lower 32 bits are the number of rows, the upper 32 bits the position of the first one.

        Raises:
            StateError: the dispatch has been combined.
        """
        return self._sources[1]

    @functools.cached_property
    def _sources(self) -> tuple[torch.Tensor, torch.Tensor]:
        return expert_row_sources(self.buffers.op, self.step)


class _PhasedContext:
    """Base of the contexts of dispatch and of combine.

    Args:
        phases: the sets of buffers, which both contexts of a layer share.

    Attributes:
        phase: number of the set that the next call uses, 0 or 1.
        call_count: calls so far.
    """

    num_phases = NUM_PHASES

    def __init__(self, phases: list[PhaseBuffers]) -> None:
        self.phases = phases
        self.phase = self.call_count = 0
        self._finalized = False
        config = phases[0].op.config
        self.max_m, self.hidden, self.topk = config.max_num_inp_token_per_rank, config.hidden_dim, config.topk
        self.num_experts, self.rank, self.world_size = config.total_experts, config.rank, config.world_size

    @property
    def signal_val(self) -> int:
        """The number of uses of the next call's set of buffers, that call included: 1, 1, 2, 2, 3, 3, ...

        No call of this package reads it: kernels count steps in device memory, so that replays of graphs count, too.
        """
        return self.call_count // self.num_phases + 1

    @property
    def buffers(self) -> PhaseBuffers:
        """The set of buffers that the next call uses."""
        return self.phases[self.phase]

    def update_phase(self) -> None:
        """Makes the next call use the other set of buffers."""
        self.phase = (self.phase + 1) % self.num_phases
        self.call_count += 1

    def restart(self) -> None:
        """Makes the next call use the first set of buffers, as in a new layer; must be called on every rank."""
        self.phase = self.call_count = 0

    def finalize(self) -> None:
        """Ends this context's use of the buffers. Idempotent; the second context to end closes the ops.

        On one node local; on several the ranks meet when the ops are closed.
        """
        if not self._finalized:
            self._finalized = True
            for buffers in self.phases:
                buffers.release()


class LowlatencyDispatchContext(_PhasedContext):
    """The context of dispatch: two sets of buffers, used in turn."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that dispatch returns."""
        return self.phases[0].op.config.wire_dtype


class LowlatencyCombineContext(_PhasedContext):
    """The context of combine: two sets of buffers, used in turn."""

    def __init__(self, phases: list[PhaseBuffers]) -> None:
        super().__init__(phases)
        self._asked_phases: set[int] = set()

    def restart(self) -> None:
        """Makes the next call use the first set of buffers, whose rows for zero_copy are to be written anew."""
        super().restart()
        self._asked_phases.clear()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of combine's rows and of its result."""
        return self.phases[0].op.config.combined_dtype

    @property
    def send_tokens_comm_buf(self) -> torch.Tensor:
        """Memory for the next combine's rows: [num_experts_per_rank, world_size * max_m, hidden] of `dtype`.

        A combine with zero_copy reads it. The first access allocates it. It saves no copy: combine sends rows from any
        memory.
        """
        op = self.buffers.op
        self._asked_phases.add(self.phase)
        rows = op.get_registered_combine_input_buffer(self.dtype)
        return rows.view(op.config.num_local_experts, self.world_size * self.max_m, self.hidden)

    def filled_comm_buf(self) -> torch.Tensor:
        """Returns send_tokens_comm_buf for a combine with zero_copy.

        Raises:
            InputError: nobody has asked for this buffer, so no rows can be in it.
        """
        if self.phase not in self._asked_phases:
            raise InputError(
                "rows in combine_ctx.send_tokens_comm_buf with zero_copy",
                "a buffer that nobody has asked for",
                "Write the rows there before each combine, or pass zero_copy=False.",
            )
        return self.send_tokens_comm_buf


def create_ep_ll_a2a_ctx(
    max_m: int,
    hidden: int,
    topk: int,
    num_experts: int,
    online_quant_fp8: bool,
    fp8_gsize: int,
    dtype: torch.dtype,
    world_size: int,
    rank: int,
    *,
    local_world_size: int | None = None,
    arena: Arena | None = None,
) -> tuple[LowlatencyDispatchContext, LowlatencyCombineContext]:
    """Makes the buffers of a layer and its two contexts. Collective.

    Args:
        max_m: M, the most tokens that any rank brings. hidden: H. topk: K. num_experts: over all ranks.
        online_quant_fp8: whether dispatch casts to fp8, with a scale per `fp8_gsize` elements.
        fp8_gsize: elements that share a scale. With online_quant_fp8 dispatch's kernel casts in groups of 128 or
            `hidden`, and torch casts before it in others.
        dtype: of the tokens given to dispatch; float8_e4m3fn for tokens that are all cast already.
        world_size, rank: those of the arena's group.
        local_world_size: ranks of a node, which follow one another; a divisor of world_size. Less than a host has cuts
            virtual nodes. None = the ranks' hosts decide.
        arena: allocates memory; None takes the symmetric world's, which the first layer makes of all ranks.

    Raises:
        ConfigError: an argument is impossible, or local_world_size would put ranks of two hosts on one node.
        UnsupportedError: local_world_size does not divide world_size, or hosts have unequal numbers of ranks.
        ConfigMismatchError: arguments differ between ranks, or another rank could not come.
        NotInitializedError: no arena is given, and torch.distributed has not been initialised.
        RankTimeoutError: ranks did not come.
    """
    if arena is None:
        arena = world_arena()
    with arena.rendezvous.telling(), max_tokens_named("max_m"):
        # the ranks may meet for these, so they come before what one rank alone may refuse
        indices = [arena.unshared_index() for _ in range(NUM_PHASES)]
        topology = _nodes(arena, world_size, local_world_size)
        quant_type, num_scales = _cast_of(hidden, online_quant_fp8, fp8_gsize, dtype)
        checked_integer("num_experts", num_experts, 1)
        checked_integer("world_size", world_size, 1)
        config = EpDispatchCombineConfig(
            data_type=FP8_DTYPE if num_scales else dtype,
            combine_dtype=dtype if num_scales and online_quant_fp8 else None,
            rank=rank,
            world_size=world_size,
            hidden_dim=hidden,
            scale_dim=num_scales,
            scale_type_size=SCALE_BYTES if num_scales else 0,
            max_token_type_size=WIDEST_ELEMENT_BYTES,
            max_num_inp_token_per_rank=max_m,
            num_experts_per_rank=num_owned_experts(num_experts, world_size, rank),
            num_experts_per_token=topk,
            num_experts=num_experts,
            kernel_type=inter_node_kernel(max_m) if topology.internode else KernelType.IntraNode,
            gpu_per_node=topology.gpu_per_node if topology.internode else world_size,
            quant_type=quant_type.value,
            layout=Layout.EXPERT_MAJOR.value,
        )
        factory = OpFactory(arena, CombineTimeWeightsOp)
        places = [None] * NUM_PHASES if topology.internode else indices
        ops = [cast("CombineTimeWeightsOp", factory.make(config, topology, place)) for place in places]

    def end() -> None:
        factory.close(alone=False)
        for index in indices:
            arena.give_back(index)

    if topology.internode:
        # finalize closes this op last; the factory may have made an arena for both
        ops[-1].close_after = end
    cast_group = fp8_gsize if online_quant_fp8 and num_scales else 0
    phases = [PhaseBuffers(op, cast_group) for op in ops]
    return LowlatencyDispatchContext(phases), LowlatencyCombineContext(phases)


def _nodes(arena: Arena, world_size: int, local_world_size: int | None) -> Topology:
    """Returns the nodes of a layer. Collective."""
    report = gather_report(arena.group, arena.rendezvous)
    if local_world_size is not None and (local_world_size < 1 or world_size % local_world_size):
        raise UnsupportedError(
            f"a local_world_size that divides world_size {world_size}",
            str(local_world_size),
            remedy_of("triton_distributed", "EPLowLatencyAllToAllLayer", "local_world_size"),
        )
    try:
        return classify(report, local_world_size)
    except ConfigError as error:
        error.field = "local_world_size"
        raise


def _cast_of(hidden: int, online_quant_fp8: bool, fp8_gsize: int, dtype: torch.dtype) -> tuple[QuantType, int]:
    """Returns the cast inside dispatch, and the scales of a token that is cast before; 0 = none."""
    checked_integer("fp8_gsize", fp8_gsize, 1)
    if not online_quant_fp8 and dtype != FP8_DTYPE:
        return QuantType.NONE, 0
    if checked_integer("hidden", hidden, 1) % fp8_gsize:
        raise ConfigError(f"a multiple of fp8_gsize {fp8_gsize} with fp8 tokens", str(hidden), field="hidden")
    if not online_quant_fp8:
        return QuantType.NONE, hidden // fp8_gsize
    if dtype == FP8_DTYPE:
        raise ConfigError(
            "dtype before the cast (bfloat16, float16 or float32) with online_quant_fp8",
            "float8_e4m3fn",
            "Pass online_quant_fp8=False for tokens that are all cast already.",
        )
    if fp8_gsize == FP8_GROUP_SIZE:
        return QuantType.FP8_PER_1X128, 0
    return (QuantType.FP8_PER_TOKEN, 0) if fp8_gsize == hidden else (QuantType.NONE, hidden // fp8_gsize)
