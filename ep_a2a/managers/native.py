"""The manager of this package's own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ep_a2a.errors import ConfigError, EpA2AError, HostMemoryError, UnsupportedError
from ep_a2a.kernels.base_op import agree_on_config
from ep_a2a.managers.base import All2AllManagerBase, Capabilities
from ep_a2a.managers.handle_kwargs import config_from_handle_kwargs
from ep_a2a.memory.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.kernels.op import EpDispatchCombineOp
    from ep_a2a.topology import Topology


class NativeAll2AllManager(All2AllManagerBase):
    """Ops on Triton kernels that write into peers' memory: over NVLink on GPUs, over shared memory on CPU.

    One node is served by IntraNode. The manager owns an arena: the first op makes it, ops of the same handle kwargs
    get the same addresses again, and `destroy` gives the memory back. Tokens are exchanged through ops only.
    """

    backend = "ep_a2a"
    capabilities = Capabilities(
        has_handles=True, dispatches_tokens=False, output_is_reduced=True, graph_safe=True, runs_on_cpu=True
    )

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._arena: Arena | None = None
        self._max_sms = 0
        self._ops: WeakValueDictionary[tuple[EpDispatchCombineConfig, int], EpDispatchCombineOp] = WeakValueDictionary()

    @property
    def arena(self) -> Arena:
        """Where ops get their memory; made on first use, which allocates nothing yet but must happen on every rank."""
        self._require_open()
        if self._arena is None:
            self._device_in_use = True
            self._arena = Arena(self.cpu_group, self.device)
        return self._arena

    def get_handle(self, kwargs: Mapping[str, Any], index: int = 0) -> EpDispatchCombineOp:
        """The op for these handle kwargs; see the base class.

        Raises:
            UnknownNameError, ConfigError: the kwargs are not right; see config_from_handle_kwargs.
            UnsupportedError: the group spans several nodes, real or cut by gpu_per_node.
            HostMemoryError: on CPU, ranks of the node do not share /dev/shm.
            ConfigMismatchError, RankTimeoutError: the ranks do not build the same op together.
        """
        self._require_open()

        def make(**kwargs: Any) -> EpDispatchCombineOp:
            # Triton is loaded when the first op is made, not when the manager is.
            from ep_a2a.kernels.op import EpDispatchCombineOp

            topology = self.topology(kwargs.get("gpu_per_node"))
            self._require_one_node(topology)
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
                op = self._ops[config, index] = EpDispatchCombineOp(config, arena=self.arena, index=index)
            return op

        op: EpDispatchCombineOp = self.handle_cache.get_or_create(kwargs, make, index)
        return op

    def _require_one_node(self, topology: Topology) -> None:
        if topology.internode:
            raise UnsupportedError(
                "a group on one node: the inter-node kernels (InterNodeV1) are not in this version", topology.reason,
                "Use the allgather_reducescatter backend, or leave gpu_per_node out where it cuts virtual nodes.",
            )  # fmt: skip
        if topology.shared_memory_problem is not None and self.device.type == "cpu":
            raise HostMemoryError(
                "ranks of one node to share /dev/shm", topology.shared_memory_problem,
                "Start the containers with --ipc=host or one common /dev/shm.",
            )  # fmt: skip

    def _choose_kernel(self, topology: Topology) -> tuple[str, str]:
        if topology.internode:
            return "InterNodeV1", f"{topology.num_nodes} nodes; not in this version"
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
        if self._arena is not None:
            self._arena.close()
            self._arena = None
