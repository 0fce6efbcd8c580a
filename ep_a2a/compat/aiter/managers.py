"""AITER's managers by their names (`aiter.dist.device_communicators.all2all`).

MoriAll2AllManager is the only one that AITER defines; the others are names that its communicator refers to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ep_a2a.compat.mori.ops import EpDispatchCombineOp
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import max_tokens_named
from ep_a2a.managers.allgather_reducescatter import AllGatherReduceScatterAll2AllManager as AgRsAll2AllManager
from ep_a2a.managers.base import Cache
from ep_a2a.managers.external.deepep import DeepEPHighThroughputAll2AllManager as DeepEPHTAll2AllManager
from ep_a2a.managers.external.deepep import DeepEPLowLatencyAll2AllManager as DeepEPLLAll2AllManager
from ep_a2a.managers.external.flashinfer import FlashInferTwoSidedAll2AllManager as FlashInferAllToAllManager
from ep_a2a.managers.external.pplx import PplxAll2AllManager as PPLXAll2AllManager
from ep_a2a.managers.naive import NaiveAll2AllManager
from ep_a2a.managers.registry import create_manager

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from ep_a2a.managers.base import All2AllManagerBase

__all__ = [
    "AgRsAll2AllManager",
    "DeepEPHTAll2AllManager",
    "DeepEPLLAll2AllManager",
    "FlashInferAllToAllManager",
    "MoriAll2AllManager",
    "NaiveAll2AllManager",
    "PPLXAll2AllManager",
]


class AiterAll2AllManager:
    """AITER's MoriAll2AllManager on one of this package's managers: `get_handle` returns ops with MORI's interface.

    All other attributes are that manager's.

    Args:
        manager: any of this package's.
    """

    def __init__(self, manager: All2AllManagerBase) -> None:
        self.manager = manager
        self.handle_cache = Cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def get_handle(self, kwargs: Mapping[str, Any], index: int = 0) -> EpDispatchCombineOp:
        """Returns the op for AITER's handle kwargs, with MORI's interface. Collective when it is new.

        The hosts of the ranks decide which kernels run. `gpu_per_node` and `low_latency` have no effect.

        Args:
            kwargs: AITER's, see config_from_handle_kwargs. `quant_type` is the cast of combine's rows.
            index: ops whose steps overlap need different indices.
        """

        wanted = {name: value for name, value in kwargs.items() if name not in ("gpu_per_node", "low_latency")}
        with max_tokens_named("max_num_tokens_per_dp_rank"):
            native = self.manager.get_handle(wanted, index)
        # a handle holds its op, so no other op has this id while the handle lives
        op: EpDispatchCombineOp = self.handle_cache.get_or_create(
            id(native), lambda: EpDispatchCombineOp.around(native)
        )
        return op

    def destroy(self) -> None:
        """Closes all ops and gives all memory back, on every rank. AITER's communicator calls it."""
        self.handle_cache.clear()
        self.manager.destroy()


class MoriAll2AllManager(AiterAll2AllManager):
    """AITER's manager on this package's own kernels. Creating one allocates no device memory.

    Args:
        cpu_group: the expert-parallel group, able to move CPU tensors (gloo).
        skip_shmem_init: without effect: there is no heap of MORI's.
    """

    def __init__(self, cpu_group: dist.ProcessGroup, skip_shmem_init: bool = False) -> None:
        super().__init__(create_manager(DEFAULT_BACKEND, cpu_group))
