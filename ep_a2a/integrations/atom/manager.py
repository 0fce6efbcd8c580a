"""The manager that AITER's communicators carry."""

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

        As in AITER, the hosts of the ranks decide which kernels run. `gpu_per_node` has no effect.

        Args:
            kwargs: AITER's, see config_from_handle_kwargs. `quant_type` is the cast of combine's rows.
            index: ops whose steps overlap need different indices.
        """

        wanted = {name: value for name, value in kwargs.items() if name != "gpu_per_node"}
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


def install_manager(communicator: Any, backend: str = "") -> AiterAll2AllManager:
    """Sets an AITER communicator's `all2all_manager` to one of this package's managers, and returns it.

    The first call makes the manager; later calls return the same one. Call it before the property is read, or AITER
    makes a manager of its own. The communicator destroys it with itself.

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
    aiter_manager = _managers[communicator] = AiterAll2AllManager(manager)
    communicator.all2all_manager = aiter_manager
    return aiter_manager
