"""The manager of this package's own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ep_a2a.config import MAX_TOPK
from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.config.kernel_choice import picked_kernel
from ep_a2a.errors import ConfigError, EpA2AError, HostMemoryError
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.node_grid import NodeGrid
from ep_a2a.ops.base import agree_on_config
from ep_a2a.ops.factory import OpFactory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.factory import NativeOp
    from ep_a2a.topology import Topology


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
            "several nodes: virtual ones of one host so far",
        ),
    )  # fmt: skip

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        super().__init__(cpu_group, tcp_store_group)
        self._arena: Arena | None = None
        self._factory: OpFactory | None = None
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

    @property
    def _op_factory(self) -> OpFactory:
        if self._factory is None:
            self._factory = OpFactory(self.arena)
        return self._factory

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
            if topology.internode:
                kwargs.setdefault("gpu_per_node", NodeGrid.of(topology, self.rank).gpus_per_node)
            self._require_shared_memory(topology)
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
                op = self._ops[config, index] = self._op_factory.make(config, topology, index)
            return op

        op: NativeOp = self.handle_cache.get_or_create(kwargs, make, index)
        return op

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes that the ops made so far take on this device."""
        num_own_bytes: int = sum(op.num_own_bytes for op in self.handle_cache.handles())
        return num_own_bytes + sum(each.num_bytes for each in (self._arena, self._factory) if each is not None)

    def _require_shared_memory(self, topology: Topology) -> None:
        if topology.shared_memory_problem is not None and self.device.type == "cpu":
            raise HostMemoryError(
                "ranks of one node to share /dev/shm", topology.shared_memory_problem,
                "Start the containers with --ipc=host or one common /dev/shm.",
            )  # fmt: skip

    @classmethod
    def kernel_for(cls, num_nodes: int, max_num_tokens: int | None = None) -> tuple[str, str]:
        """IntraNode, InterNodeV1 or InterNodeV1LL; see the base class."""
        return picked_kernel(num_nodes, max_num_tokens)

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
        if self._factory is not None:
            self._factory.close()
            self._factory = None
        if self._arena is not None:
            self._arena.close(alone=self._closes_alone)
            self._arena = None
