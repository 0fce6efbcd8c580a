"""The contexts of the layer: each knows which of two sets of buffers its next call uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.compat.triton_distributed.phases import PhaseBuffers, make_config, nodes_of
from ep_a2a.compat.triton_distributed.utils import world_arena
from ep_a2a.errors import InputError, max_tokens_named
from ep_a2a.ops.factory import OpFactory
from ep_a2a.topology import gather_report

if TYPE_CHECKING:
    import torch

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.topology import Topology


NUM_PHASES = 2


class _PhasedContext:
    """Base of the contexts of dispatch and of combine.

    Args:
        phases: the sets of buffers, which both contexts of a layer share.
        online_quant_fp8, fp8_gsize: as given to the layer.

    Attributes:
        phase: number of the set that the next call uses, 0 or 1.
        call_count: calls so far.
    """

    num_phases = NUM_PHASES

    def __init__(self, phases: list[PhaseBuffers], online_quant_fp8: bool, fp8_gsize: int) -> None:
        self.phases = phases
        self.online_quant_fp8, self.fp8_gsize = online_quant_fp8, fp8_gsize
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

    def __init__(self, phases: list[PhaseBuffers], online_quant_fp8: bool, fp8_gsize: int) -> None:
        super().__init__(phases, online_quant_fp8, fp8_gsize)
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
        indices = [arena.unshared_index() for _ in range(NUM_PHASES)]
        report = gather_report(arena.group, arena.rendezvous)
        topology = nodes_of(report, world_size, local_world_size)
        per_node = topology.gpu_per_node if topology.internode else world_size
        config = make_config(
            max_m, hidden, topk, num_experts, online_quant_fp8, fp8_gsize, dtype, world_size, rank, per_node
        )
        cast_group = fp8_gsize if online_quant_fp8 and not config.casts_in_dispatch else 0
        phases = [PhaseBuffers(op, cast_group) for op in _make_ops(config, topology, arena, indices)]
    return (
        LowlatencyDispatchContext(phases, online_quant_fp8, fp8_gsize),
        LowlatencyCombineContext(phases, online_quant_fp8, fp8_gsize),
    )


def _make_ops(
    config: EpDispatchCombineConfig, topology: Topology, arena: Arena, indices: list[int]
) -> list[CombineTimeWeightsOp]:
    """Returns an op for each of the arena's indices. Collective."""
    if not topology.internode:
        return [CombineTimeWeightsOp(config, arena=arena, index=index) for index in indices]
    factory = OpFactory(arena, CombineTimeWeightsOp)
    ops = [cast("CombineTimeWeightsOp", factory.make(config, topology, None)) for _ in indices]

    def end() -> None:
        factory.close(alone=False)
        for index in indices:
            arena.give_back(index)

    # finalize closes this op last; the factory may have made an arena for both
    ops[-1].close_after = end
    return ops
