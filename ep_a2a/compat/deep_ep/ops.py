"""The ops of a buffer, each made by the first call of its shape, and kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.config import FP8_DTYPE, CompiledCalls, Layout, QuantType, ScaleFormat
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import ConfigError, EpA2AError, TooManyTokensError, max_tokens_named
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.memory.device_groups import DeviceGroups
from ep_a2a.memory.guards import outside_modes
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup
from ep_a2a.ops.factory import OpFactory

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.op import EpDispatchCombineOp
    from ep_a2a.topology import Topology


@dataclass(frozen=True)
class OpShape:
    """The key of a buffer's ops.

    Attributes:
        dtype: of the tokens that are given to dispatch.
        hidden_dim, topk, num_experts, max_tokens: sizes; max_tokens of any rank.
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

    def handle_kwargs(self, rank: int, num_ranks: int, gpus_per_node: int) -> dict[str, Any]:
        """Returns the handle kwargs for the manager."""
        quantised = self.dtype == FP8_DTYPE
        casts = self.scale_format is not None
        kwargs: dict[str, Any] = {
            "rank": rank,
            "num_ep_ranks": num_ranks,
            "gpu_per_node": gpus_per_node,
            # the dtype of combine's rows; DeepEP combines bf16 rows if tokens travel as fp8
            "input_dtype": torch.bfloat16 if quantised else self.dtype,
            "quant_dtype": FP8_DTYPE if quantised or casts else self.dtype,
            "token_hidden_size": self.hidden_dim,
            "scale_dim": self.num_scales,
            "scale_type_size": self.scale_bytes,
            "max_num_tokens_per_dp_rank": self.max_tokens,
            "num_local_experts": self.num_experts // num_ranks,
            "num_experts_per_token": self.topk,
            "layout": self.layout.value,
            "quant_type": QuantType.FP8_PER_1X128.value if casts else QuantType.NONE.value,
            # low-latency calls need few of the compiled kernels
            "compiled_calls": (CompiledCalls.ALL if self.layout is Layout.COMPACT else CompiledCalls.SERVING).value,
        }
        if self.scale_format is not None:
            kwargs["scale_format"] = self.scale_format.value
        return kwargs


class BufferManager(NativeAll2AllManager):
    """A manager whose ops by expert may take weights in combine, as DeepEP's, which weighs rows at the token's rank."""

    def _make_op(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> EpDispatchCombineOp:
        if self._factory is None:
            self._factory = OpFactory(self.arena, CombineTimeWeightsOp)
        return super()._make_op(config, topology, index)


class Ops:
    """A manager and its ops by shape and memory index. Construction is collective.

    Args:
        group: the ranks; any backend.
        device: where tokens are; None = the current CUDA device, or CPU without one.
        max_tokens: a bound on every rank's tokens, equal on all ranks; 0 = not known.
        gpus_per_node: None goes by the ranks' hosts; a number cuts virtual nodes of that many ranks.

    Attributes:
        topology: the nodes of the group.

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
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.max_tokens = checked_integer("max_num_tokens_per_rank", max_tokens, 0)
        backends = dist.get_backend_config(group)
        self._own_group: dist.ProcessGroup | None = None
        if "cpu:gloo" not in backends:
            self._own_group = make_subgroup(group, range(self.num_ranks))
        cpu_group = self._own_group or group
        self.manager = BufferManager(cpu_group)
        if device is not None:
            self.manager.device = torch.device(device)
        self.groups = DeviceGroups(cpu_group, group if "cuda:nccl" in backends else None)
        self._ops: dict[tuple[OpShape, int], EpDispatchCombineOp] = {}
        self._num_sms: dict[EpDispatchCombineOp, int] = {}
        try:
            self.topology = self.groups.rendezvous.attempt("finding the nodes", lambda: self._find_nodes(gpus_per_node))
        except EpA2AError:
            self.close()
            raise

    def _find_nodes(self, gpus_per_node: int | None) -> Topology:
        try:
            topology = self.manager.topology(gpus_per_node)
        except ConfigError as error:
            error.field = "gpus_per_node"
            raise
        NodeGrid.of(topology, self.rank)
        return topology

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self.manager.device

    def max_tokens_for(self, num_tokens: int) -> int:
        """Returns M of the op for a step.

        Args:
            num_tokens: the most tokens of any rank, equal on all ranks.

        Raises:
            TooManyTokensError: more than the bound that the buffer was given.
        """
        if not self.max_tokens:
            return 1 << (num_tokens - 1).bit_length()  # powers of two: few ops are made while batches grow
        if num_tokens > self.max_tokens:
            raise TooManyTokensError(
                f"at most {self.max_tokens} tokens on any rank (max_num_tokens_per_rank)",
                str(num_tokens),
                "Raise max_num_tokens_per_rank of the buffer on every rank, or leave it out.",
            )
        return self.max_tokens

    @outside_modes()
    def get(self, shape: OpShape, index: int) -> EpDispatchCombineOp:
        """Returns the op of this shape on the memory of this index. Collective when it is new."""
        key = shape, index
        if key not in self._ops:
            low_latency = shape.layout is Layout.EXPERT_MAJOR
            with max_tokens_named("num_max_dispatch_tokens_per_rank" if low_latency else "max_num_tokens_per_rank"):
                self._ops[key] = self.manager.get_handle(self._handle_kwargs(shape), index)
        return self._ops[key]

    def _handle_kwargs(self, shape: OpShape) -> dict[str, Any]:
        return shape.handle_kwargs(self.rank, self.num_ranks, self.topology.gpu_per_node)

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
        self.manager.destroy(alone=True)
        self.groups.close()
        if self._own_group is not None:
            destroy_subgroup(self._own_group)
            self._own_group = None
