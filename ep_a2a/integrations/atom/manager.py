"""Puts one of this package's managers behind an AITER communicator."""

from typing import Any
from weakref import WeakKeyDictionary

from ep_a2a import env
from ep_a2a.compat.aiter.managers import make_manager
from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import UnsupportedError
from ep_a2a.managers.base import All2AllManagerBase

_managers: WeakKeyDictionary[Any, All2AllManagerBase] = WeakKeyDictionary()


def install_manager(communicator: Any, backend: str = "") -> All2AllManagerBase:
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
    manager = make_manager(name, communicator.cpu_group)
    manager.device = communicator.device
    if communicator.device_group is not None and communicator.device_group is not communicator.cpu_group:
        manager.device_group = communicator.device_group
    communicator.all2all_manager = _managers[communicator] = manager
    return manager
