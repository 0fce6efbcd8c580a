"""Our managers as AITER's communicators carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ep_a2a import env
from ep_a2a.compat.mori.ops import EpDispatchCombineOp
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import UnsupportedError
from ep_a2a.managers.base import Cache
from ep_a2a.managers.registry import create_manager

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ep_a2a.managers.base import All2AllManagerBase

_managers: WeakKeyDictionary[Any, AiterAll2AllManager] = WeakKeyDictionary()


class AiterAll2AllManager:
    """AITER's MoriAll2AllManager on one of our managers, which has everything that is not here.

    `get_handle` takes AITER's handle kwargs and returns ops with MORI's interface.

    Args:
        manager: ours.
    """

    def __init__(self, manager: All2AllManagerBase) -> None:
        self.manager = manager
        self.handle_cache = Cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def get_handle(self, kwargs: Mapping[str, Any], index: int = 0) -> EpDispatchCombineOp:
        """The op for AITER's handle kwargs, with MORI's interface. Collective when it does not exist yet.

        As in AITER, where the ranks really are decides which kernels run, and `gpu_per_node` does not; ours have no
        further use for it.

        Args:
            kwargs: AITER's: see config_from_handle_kwargs. `quant_type` is what combine's rows are cast to.
            index: ops whose steps overlap need different indices.
        """

        def make(**kwargs: Any) -> EpDispatchCombineOp:
            return EpDispatchCombineOp.around(self.manager.get_handle(kwargs, index))

        wanted = {name: value for name, value in kwargs.items() if name != "gpu_per_node"}
        op: EpDispatchCombineOp = self.handle_cache.get_or_create(wanted, make, index)
        return op

    def destroy(self) -> None:
        """Closes every living op and gives all memory back; AITER's communicator calls it. On every rank."""
        self.handle_cache.clear()
        self.manager.destroy()


def install_manager(communicator: Any, backend: str = "") -> AiterAll2AllManager:
    """Puts a manager of ours behind an AITER communicator's `all2all_manager`, by its setter.

    Makes it by the first call, and gives it again after that. AITER makes none of its own if nobody has read the
    property before; the communicator destroys ours with itself.

    Args:
        communicator: `get_ep_group().device_communicator`.
        backend: its name; "" takes EP_A2A_BACKEND, then "ep_a2a".

    Raises:
        UnsupportedError: the communicator is not an expert-parallel group's.
        UnknownNameError: no such backend.
    """
    if communicator in _managers:
        return _managers[communicator]
    if not communicator.is_ep_communicator:
        raise UnsupportedError(
            "an expert-parallel communicator", "another group's", "Use get_ep_group().device_communicator."
        )
    name = backend or env.BACKEND.get() or DEFAULT_BACKEND
    manager = create_manager(name, communicator.cpu_group)
    manager.device = communicator.device
    if communicator.device_group is not None and communicator.device_group is not communicator.cpu_group:
        manager.device_group = communicator.device_group
    ours = _managers[communicator] = AiterAll2AllManager(manager)
    communicator.all2all_manager = ours
    return ours
