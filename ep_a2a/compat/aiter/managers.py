"""AITER's managers by their names (`aiter.dist.device_communicators.all2all`).

MoriAll2AllManager is the only one that AITER defines; the others are names that its communicator refers to.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch.distributed as dist

from ep_a2a.compat.mori.ops import EpDispatchCombineOp
from ep_a2a.compat.parameters import take_mori_variables
from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.config import EpDispatchCombineKernelType as KernelType
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import max_tokens_named
from ep_a2a.managers.base import All2AllManagerBase, Cache
from ep_a2a.managers.collective import AllGatherReduceScatterAll2AllManager as AgRsAll2AllManager
from ep_a2a.managers.collective import NaiveAll2AllManager
from ep_a2a.managers.external.deepep import DeepEPHighThroughputAll2AllManager as DeepEPHTAll2AllManager
from ep_a2a.managers.external.deepep import DeepEPLowLatencyAll2AllManager as DeepEPLLAll2AllManager
from ep_a2a.managers.external.flashinfer import FlashInferTwoSidedAll2AllManager as FlashInferAllToAllManager
from ep_a2a.managers.external.pplx import PplxAll2AllManager as PPLXAll2AllManager
from ep_a2a.managers.native import NativeAll2AllManager
from ep_a2a.managers.registry import create_manager, manager_type
from ep_a2a.topology import Topology

__all__ = [
    "AgRsAll2AllManager",
    "DeepEPHTAll2AllManager",
    "DeepEPLLAll2AllManager",
    "FlashInferAllToAllManager",
    "MoriAll2AllManager",
    "NaiveAll2AllManager",
    "PPLXAll2AllManager",
]


class MoriHandles(All2AllManagerBase):
    """First base of a manager whose handles have MORI's interface; the second is one of this package's managers.

    `get_handle` takes AITER's kwargs, see config_from_handle_kwargs. As in AITER, the hosts of the ranks decide which
    kernels run, and between nodes these are InterNodeV1. `low_latency` has no effect. `quant_type` is the cast of
    combine's rows. A `gpu_per_node` of 2 or more cuts a host into virtual nodes of so many ranks; one that is no less
    than a host has, and 1, the value of AITER's test, have no effect.
    """

    def __init__(self, cpu_group: dist.ProcessGroup, tcp_store_group: Any = None) -> None:
        take_mori_variables()
        super().__init__(cpu_group, tcp_store_group)
        self._mori_ops = Cache()

    def _get_handle(self, kwargs: Mapping[str, Any], index: int) -> EpDispatchCombineOp:
        per_node = kwargs.get("gpu_per_node")
        wanted = {name: value for name, value in kwargs.items() if name not in ("gpu_per_node", "low_latency")}
        if isinstance(per_node, int) and 1 < per_node < self.world_size and per_node < self.topology().gpu_per_node:
            wanted["gpu_per_node"] = per_node
        with max_tokens_named("max_num_tokens_per_dp_rank"):
            native = super()._get_handle(wanted, index)
        # a handle holds its op, so no other op has this id while the handle lives
        op: EpDispatchCombineOp = self._mori_ops.get_or_create(id(native), lambda: EpDispatchCombineOp.around(native))
        return op

    def _make_op(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> Any:
        if topology.internode:
            config = replace(config, kernel_type=KernelType.InterNodeV1)
        return super()._make_op(config, topology, index)

    def destroy(self, *, alone: bool = False) -> None:
        """Closes all ops and gives all memory back, on every rank. AITER's communicator calls it."""
        for op in self._mori_ops.handles():
            op.close()
        super().destroy(alone=alone)


class MoriAll2AllManager(MoriHandles, NativeAll2AllManager):
    """AITER's manager on this package's own kernels. Creating one allocates no device memory.

    Args:
        cpu_group: the expert-parallel group, able to move CPU tensors (gloo).
        skip_shmem_init: without effect: there is no heap of MORI's.
    """

    def __init__(self, cpu_group: dist.ProcessGroup, skip_shmem_init: bool = False) -> None:
        super().__init__(cpu_group)

    @classmethod
    def kernel_for(cls, num_nodes: int, max_tokens: int | None = None) -> tuple[str, str]:
        """Returns IntraNode or InterNodeV1, and why. Local."""
        if num_nodes == 1:
            return super().kernel_for(num_nodes, max_tokens)
        return KernelType.InterNodeV1.name, f"{num_nodes} nodes, by AITER's table"


def make_manager(backend: str, cpu_group: dist.ProcessGroup) -> All2AllManagerBase:
    """Returns a manager of a backend, whose handles have MORI's interface. Allocates no device memory.

    Managers without `capabilities.has_handles`, such as those that were written for AITER, are returned as they are.

    Args:
        backend: a registered name.
        cpu_group: the expert-parallel group, able to move CPU tensors (gloo).

    Raises:
        UnknownNameError: no such backend. MissingPackageError: it wraps a package that is not installed.
    """
    if backend == DEFAULT_BACKEND:
        return MoriAll2AllManager(cpu_group)
    kind = manager_type(backend)
    if kind is None or not kind.capabilities.has_handles:
        return create_manager(backend, cpu_group)
    made = type(kind.__name__, (MoriHandles, kind), {"__doc__": kind.__doc__})
    return cast("All2AllManagerBase", made(cpu_group))
