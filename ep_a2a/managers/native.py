"""The manager of this package's own kernels."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ep_a2a.config import MAX_TOPK, QuantType
from ep_a2a.errors import ConfigError, EpA2AError, HostMemoryError
from ep_a2a.kernels.base_op import agree_on_config
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.managers.handle_kwargs import config_from_handle_kwargs
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.memory.rail_choice import choose_transport, make_rail
from ep_a2a.memory.subgroups import destroy_subgroup, make_subgroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.kernels.op import EpDispatchCombineOp
    from ep_a2a.managers.inter_node_op import InterNodeDispatchCombineOp
    from ep_a2a.topology import Topology

    NativeOp = EpDispatchCombineOp | InterNodeDispatchCombineOp


logger = logging.getLogger(__name__)


def _why_not_rings(topology: Topology, config: EpDispatchCombineConfig) -> str | None:
    """Why the kernels of rings cannot serve nodes, None if they can."""
    if not topology.on_one_host:
        return "nodes of several hosts"
    if config.combine_quant is not QuantType.NONE:
        return f"quant_type {config.quant_type} casts on the wire of combine, which rings do not"
    return None


class Nodes:
    """What ops across nodes share: the rail between them, and an arena of the ranks of this one. Collective.

    Args:
        group: all ranks.
        grid: the nodes, and where this rank is.
        device: where tensors lie.
        timeout_secs: bound of a hop between nodes on CPU.
        reason: why the rail's transport was chosen.
    """

    def __init__(
        self, group: ProcessGroup, grid: NodeGrid, device: torch.device, timeout_secs: float, reason: str
    ) -> None:
        self._group = make_subgroup(group, grid.node_ranks)
        self.rail = make_rail(reason, group, grid, device, timeout_secs)
        self.arena = Arena(self._group, device)

    def close(self) -> None:
        """Gives everything back; to be called on every rank."""
        self.arena.close()
        self.rail.close()
        destroy_subgroup(self._group)


class NativeAll2AllManager(All2AllManagerBase):
    """Ops on Triton kernels that write into peers' memory: over NVLink on GPUs, over shared memory on CPU.

    One node is served by IntraNode, several by InterNodeV1, or InterNodeV1LL where no rank ever has many tokens. The
    manager owns the memory: ops of the same handle kwargs get the same addresses again, and `destroy` gives it back.
    Tokens are exchanged through ops only.
    """

    backend = "ep_a2a"
    capabilities = Capabilities(
        layouts=("compact", "rank_major", "expert_major"), cast="inside",
        combine_casts=("none", "fp8_direct_cast", "fp8_blockwise"), max_topk=MAX_TOPK, receive_cap=True,
        runs_on_cpu=True, was_run="CPU; H200s, one node",
        notes=(
            "expert_major: combine applies the weights",
            "several nodes: over torch.distributed, on CPU so far, without source positions",
        ),
    )  # fmt: skip

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._arena: Arena | None = None
        self._nodes: dict[int, Nodes] = {}
        self._max_sms = 0
        self._ops: WeakValueDictionary[tuple[EpDispatchCombineConfig, int], NativeOp] = WeakValueDictionary()

    @property
    def arena(self) -> Arena:
        """Where ops get their memory; made on first use, which allocates nothing yet but must happen on every rank."""
        self._require_open()
        if self._arena is None:
            self._device_in_use = True
            self._arena = Arena(self.cpu_group, self.device)
        return self._arena

    def get_handle(self, kwargs: Mapping[str, Any], index: int = 0) -> NativeOp:
        """The op for these handle kwargs; see the base class.

        Raises:
            UnknownNameError, ConfigError: the kwargs are not right; see config_from_handle_kwargs.
            UnsupportedError: the group spans nodes of unlike sizes, or whose ranks do not follow one another.
            HostMemoryError: on CPU, ranks of the node do not share /dev/shm.
            ConfigMismatchError, RankTimeoutError: the ranks do not build the same op together.
        """
        self._require_open()

        def make(**kwargs: Any) -> NativeOp:
            topology = self.topology(kwargs.get("gpu_per_node"))
            grid = NodeGrid.of(topology, self.rank) if topology.internode else None
            self._require_shared_memory(topology)
            if grid is not None:
                kwargs.setdefault("gpu_per_node", grid.gpus_per_node)
            if self._max_sms:
                kwargs.setdefault("max_sms", self._max_sms)
            try:
                config = config_from_handle_kwargs(kwargs, topology.internode)
            except EpA2AError as error:
                # the other ranks would wait for this one
                agree_on_config(None, self.arena.rendezvous, index, error)
                raise
            # kwargs that say the same in other words mean the same op, not a second one on its memory
            op = self._ops.get((config, index))
            if op is None:
                op = self._ops[config, index] = self._make_op(config, topology, grid, index)
            return op

        op: NativeOp = self.handle_cache.get_or_create(kwargs, make, index)
        return op

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes that the ops made so far take on this device."""
        arenas = [nodes.arena for nodes in self._nodes.values()] + ([self._arena] if self._arena else [])
        num_own_bytes: int = sum(op.num_own_bytes for op in self.handle_cache.handles())
        return num_own_bytes + sum(arena.num_bytes for arena in arenas)

    def _make_op(
        self, config: EpDispatchCombineConfig, topology: Topology, grid: NodeGrid | None, index: int
    ) -> NativeOp:
        # Triton is loaded when the first op is made, not when the manager is.
        transport, reason = "peer_memory", "one node"
        if grid is not None:
            transport, reason = choose_transport(config.rail, why_not_peer_memory=_why_not_rings(topology, config))
        if grid is None or transport == "peer_memory":
            from ep_a2a.kernels.op import EpDispatchCombineOp

            logger.info("%s through %s: %s", config.kernel_type.name, transport, reason)
            return EpDispatchCombineOp(config, arena=self.arena, index=index)
        from ep_a2a.managers.inter_node_op import InterNodeDispatchCombineOp

        nodes = self._nodes.get(grid.num_nodes)
        if nodes is None:
            nodes = self._nodes[grid.num_nodes] = Nodes(self.cpu_group, grid, self.device, config.timeout, reason)
        return InterNodeDispatchCombineOp(config, grid, nodes.rail, nodes.arena, self.arena.rendezvous, index)

    def _require_shared_memory(self, topology: Topology) -> None:
        if topology.shared_memory_problem is not None and self.device.type == "cpu":
            raise HostMemoryError(
                "ranks of one node to share /dev/shm", topology.shared_memory_problem,
                "Start the containers with --ipc=host or one common /dev/shm.",
            )  # fmt: skip

    def _choose_kernel(self, topology: Topology) -> tuple[str, str]:
        if topology.internode:
            return "InterNodeV1", f"{topology.num_nodes} nodes: one hop between them, one inside (V1LL for few tokens)"
        return "IntraNode", "all ranks on one node"

    def set_num_sms(self, num_sms: int) -> None:
        """Bounds the multiprocessors of ops made from now on, and of living ones that can change it; 0 = no bound.

        Must be called with the same number on every rank.

        Raises:
            ConfigError: num_sms is not an integer >= 0.
        """
        if not isinstance(num_sms, int) or isinstance(num_sms, bool) or num_sms < 0:
            raise ConfigError("num_sms to be an integer >= 0", repr(num_sms))
        self._max_sms = num_sms
        for op in self.handle_cache.handles():
            op.set_max_sms(num_sms)

    def max_sms_used(self) -> int | None:
        """The number given to set_num_sms; None without a bound."""
        return self._max_sms or None

    def _release(self) -> None:
        for nodes in self._nodes.values():
            nodes.close()
        self._nodes.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None
