"""The manager of this package's own kernels."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.config import MAX_TOPK, Layout
from ep_a2a.config.enums import picked_kernel
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import (
    AlternationError,
    DeviceError,
    DtypeError,
    HostMemoryError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.guards import is_capturing
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.ops.factory import OpFactory
from ep_a2a.ops.inputs import address_of, in_int32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.arguments import Step
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.topology import Topology


class NativeAll2AllManager(All2AllManagerBase):
    """Ops on Triton kernels that write into peers' memory: over NVLink on GPUs, over shared memory on CPU.

    IntraNode serves one node. InterNodeV1 serves several, or InterNodeV1LL where no rank ever has many tokens. The
    manager owns the memory: ops of the same handle kwargs get the same addresses again, and `destroy` gives it back.

    `dispatch` and `combine` work on hidden states, for callers that can use any backend. The handle that dispatch is
    told moves the rows, or the only living one. Engines that can should call the ops, which wait for nothing on the
    host.
    """

    backend = "ep_a2a"
    capabilities = Capabilities(
        dispatches_tokens=True,
        masks_ranks=True,
        layouts=("compact", "rank_major", "expert_major"),
        local_ids=True,
        packs_rows=True,
        cast="inside",
        combine_casts=("none", "fp8_direct_cast", "fp8_blockwise"),
        max_topk=MAX_TOPK,
        receive_cap=True,
        runs_on_cpu=True,
        was_run="CPU; H100s and H200s, one node",
        notes=(
            "expert_major: combine applies the weights",
            "several nodes: virtual ones of one host so far",
            "the manager's own dispatch waits for the host and takes no router logits",
            "AMD GPUs: compiled for gfx942 and gfx950, never run",
        ),
    )

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._arena: Arena | None = None
        self._factory: OpFactory | None = None
        self._max_sms = 0
        # the op that serves a dispatch, held until its combine, and its received rows, in one number or by source rank
        self._serving: tuple[EpDispatchCombineOp, list[int]] | None = None
        self._dispatched_by: weakref.ref[EpDispatchCombineOp] | None = None

    @property
    def arena(self) -> Arena:
        """The arena of the ops' memory. The first access makes it, on every rank, and allocates nothing."""
        if self._arena is None:
            self._device_in_use = True
            self._arena = Arena(self.cpu_group, self.device, rendezvous=self._rendezvous)
        return self._arena

    def _check_nodes(self, topology: Topology) -> None:
        if topology.internode:
            NodeGrid.of(topology, self.rank)
        if topology.shared_memory_problem is not None and self.device.type == "cpu":
            raise HostMemoryError(
                "ranks of one node to share /dev/shm",
                topology.shared_memory_problem,
                "Start the containers with --ipc=host or one common /dev/shm.",
            )

    def _make_op(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> EpDispatchCombineOp:
        if self._factory is None:
            self._factory = OpFactory(self.arena)
        op = self._factory.make(config, topology, index)
        if self._max_sms and not config.max_sms:
            op.set_max_sms(self._max_sms)
        return op

    def _handle(self, told: Any) -> EpDispatchCombineOp:
        """The op that the caller tells, or the only living one."""
        living = self.handle_cache.handles()
        # an op with another interface holds ours
        told = getattr(told, "native", told)
        if not living or (told is not None and told not in living):
            raise StateError(
                "a living op of this manager, whose config says how tokens travel",
                "none" if told is None else "one of another manager, or a closed one",
                "Call op = manager.get_handle(kwargs) on every rank first, and hold the op.",
            )
        if told is None and len(living) > 1:
            raise StateError(
                "the op to be told where a manager has several",
                f"{len(living)} living ops",
                "Pass the same op on every rank: manager.dispatch(..., handle=op).",
            )
        op: EpDispatchCombineOp = living[0] if told is None else told
        return op

    def _dispatch_rows(self, tensors: Sequence[torch.Tensor], handle: Any, tag: int) -> list[torch.Tensor]:
        """Brings the tokens that name an expert of this rank, by `_handle`. Synchronises the host once.

        Received tensors may be views of the op's memory: they are valid until `combine`. Their dtypes are those given.

        Args:
            tensors: in this order,
                - hidden states [T, H] of the config's data_type, T <= max_num_tokens_per_dp_rank;
                - weights [T, K] of any floating dtype; they travel in float32;
                - ids [T, K] of any integer dtype; those outside [0, num_experts) are dropped slots;
                - where the config has them (scale_dim, scale_type_size) the tokens' scales, or nothing.

        Raises:
            StateError: no op of the manager is alive, or several are and none is told.
            AlternationError: the dispatch before has not been combined.
            UnsupportedError: a CUDA graph is being captured; the config is of layout expert_major or casts inside
                dispatch; further tensors are others.
            InputError: a tensor does not fit the config; nothing was launched.
            RankTimeoutError, CapacityError, ConfigMismatchError: recorded by the kernels. Call `reset` on every rank.
        """
        op = self._handle(handle)
        if self._serving is not None and self._serving[0].open_step is not None:
            raise AlternationError(
                "combine after dispatch",
                "dispatch again",
                "Call combine; after a step that failed, manager.reset() on every rank.",
            )
        hidden_states, topk_weights, topk_ids, *extra = tensors
        for name, tensor in zip(("hidden_states", "topk_weights", "topk_ids"), tensors, strict=False):
            address_of(name, tensor)  # torch would read what it converts
        scales = self._scales_to_send(op.config, extra)
        self._dispatched_by = weakref.ref(op)
        tokens, weights, received_scales, indices, _ = op.dispatch(
            hidden_states.contiguous(),
            topk_weights.float().contiguous(),
            scales,
            in_int32(topk_ids).int().contiguous(),
            tag=tag,
        )
        counts = op.recv_counts.tolist()
        if op.config.layout == Layout.COMPACT:
            counts = [sum(counts)]
        self._serving = op, counts
        op.check()
        assert weights is not None
        found = [_received(tokens, counts), _received(weights, counts), _received(indices, counts)]
        if scales is not None and received_scales is not None:
            found.append(_received(received_scales, counts))
        return [rows.to(given.dtype) for rows, given in zip(found, tensors)]

    def _scales_to_send(self, config: EpDispatchCombineConfig, extra: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the one extra tensor that travels; raises UnsupportedError where `dispatch` cannot serve the call."""
        others = "Use naive or allgather_reducescatter, or the op that get_handle returns."
        if is_capturing(self.device):
            raise UnsupportedError(
                "dispatch outside of captures, since it waits for the number of rows",
                "a capture",
                "Capture the op's dispatch and combine instead: manager.get_handle(kwargs).",
            )
        if config.layout == Layout.EXPERT_MAJOR or config.casts_in_dispatch:
            found = f"layout {config.layout!r}, dispatch cast {config.dispatch_quant.value!r}"
            raise UnsupportedError("a handle of layout compact or rank_major without a cast in dispatch", found, others)
        if not extra:
            return None
        if len(extra) > 1 or not config.num_scales:
            raise UnsupportedError(
                "no extra_tensors, or where the handle kwargs have scale_dim the tokens' scales",
                f"{len(extra)} with scale_dim {config.scale_dim}",
                others,
            )
        return extra[0].contiguous()

    def _open_step(self) -> tuple[EpDispatchCombineOp, Step, list[int]]:
        """The op of the dispatch that comes to be combined, its step, and the received rows."""
        if self._serving is None or self._serving[0].open_step is None:
            raise AlternationError("dispatch before combine", "combine")
        op, counts = self._serving
        return op, self._serving[0].open_step, counts

    @outside_graphs
    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Returns this rank's tokens [T, H], each the sum of its experts' rows over all ranks.

        Args:
            hidden_states: [N, H] of the config's combine dtype, one row per dispatched row. It may be overwritten by
                work that is launched after this.
            is_sequence_parallel: without effect.

        Raises:
            AlternationError: there is no dispatch to combine.
            ShapeError, DtypeError, DeviceError: hidden_states does not fit; combine can be repeated.
        """
        op, step, counts = self._open_step()
        config, shape = op.config, (sum(counts), op.config.hidden_dim)
        if tuple(hidden_states.shape) != shape:
            raise ShapeError(f"hidden_states of shape {shape}, as dispatched", str(tuple(hidden_states.shape)))
        if hidden_states.dtype != config.combined_dtype:
            raise DtypeError(f"hidden_states of {config.combined_dtype}", str(hidden_states.dtype))
        if hidden_states.device != self.device:
            raise DeviceError(f"hidden_states on {self.device}", str(hidden_states.device))
        address_of("hidden_states", hidden_states)
        buffer = op.get_registered_combine_input_buffer(config.combined_dtype)[: math.prod(step.lead)]
        for block, part in zip(buffer.view(len(counts), -1, config.hidden_dim), torch.split(hidden_states, counts)):
            block[: part.shape[0]] = part
        result = torch.empty(step.num_tokens, config.hidden_dim, dtype=config.combined_dtype, device=self.device)
        op.combine(buffer.view(*step.lead, config.hidden_dim), None, None, out=result)
        self._serving = None
        return result

    @outside_graphs
    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        """Writes the result of `combine` into `output` [T, H] of any floating dtype, and returns it.

        Raises:
            ShapeError: output has another shape; combine can be repeated. Otherwise as `combine`.
        """
        op, step, _ = self._open_step()
        shape = (step.num_tokens, op.config.hidden_dim)
        if tuple(output.shape) != shape:
            raise ShapeError(f"output of shape {shape}", str(tuple(output.shape)))
        return super().combine_into_output(hidden_states, output, is_sequence_parallel)

    def reset(self) -> None:
        """Resets the op of the last dispatch after a step that failed. Collective; the step in progress is lost."""
        with self._rendezvous.telling():
            self._require_open()
            op = None if self._dispatched_by is None else self._dispatched_by()
            self._serving = None
            if op is not None and not op.closed:
                op.reset()

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes that the ops made so far take on this device."""
        return sum(each.num_bytes for each in (self._arena, self._factory) if each is not None)

    @classmethod
    def kernel_for(cls, num_nodes: int, max_tokens: int | None = None) -> tuple[str, str]:
        """Returns IntraNode, InterNodeV1, InterNodeV1LL, or both of these without max_tokens; and why. Local."""
        return picked_kernel(num_nodes, max_tokens)

    def set_num_sms(self, num_sms: int) -> None:
        """Bounds the multiprocessors of ops made from now on, and of living ones that can change it; 0 = no bound.

        Must be called with the same number on every rank.

        Raises:
            ConfigError: num_sms is not an integer >= 0.
        """
        self._max_sms = num_sms = checked_integer("num_sms", num_sms, 0)
        for op in self.handle_cache.handles():
            op.set_max_sms(num_sms)

    def max_sms_used(self) -> int | None:
        """Returns the number given to set_num_sms; None without a bound."""
        return self._max_sms or None

    def _release(self) -> None:
        self._serving = None
        if self._factory is not None:
            self._factory.close()
            self._factory = None
        if self._arena is not None:
            self._arena.close(alone=self._closes_alone)
            self._arena = None
        super()._release()


def _received(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns the received rows [sum of counts, n], without the padding rows of dispatch's result [..., n]."""
    blocks = rows.view(len(counts), -1, rows.shape[-1])
    parts = [block[:count] for block, count in zip(blocks, counts)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
