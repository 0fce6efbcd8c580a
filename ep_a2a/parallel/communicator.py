"""DeviceCommunicator of a group of ranks; an expert-parallel group's holds the all-to-all manager."""

import threading
from typing import Any

import torch
import torch.distributed as dist

from ep_a2a.config.file import DEFAULT_BACKEND
from ep_a2a.errors import ClosedError, StateError, UnsupportedError
from ep_a2a.managers.base import All2AllManagerBase


class DeviceCommunicator:
    """Communicator of one group; AITER's DeviceCommunicatorBase.

    Args:
        cpu_group: the ranks, able to communicate CPU tensors (gloo).
        device: where this rank's tensors live; None is CPU.
        device_group: the same ranks for tensors on `device`; None is `cpu_group`.
        unique_name: the group's name, "kind:number"; groups of kind "ep" are expert-parallel.
        all2all_backend: backend of the manager, by registered name; equal on all ranks. None is `default_backend`.

    Attributes:
        dp_group, tp_group: the coordinators of the data- and tensor-parallel groups that the manager is given, or None.
    """

    default_backend = DEFAULT_BACKEND

    def __init__(
        self,
        cpu_group: dist.ProcessGroup,
        device: torch.device | str | None = None,
        device_group: dist.ProcessGroup | None = None,
        unique_name: str = "",
        all2all_backend: str | None = None,
    ) -> None:
        self.cpu_group = cpu_group
        self.device = torch.device(device or "cpu")
        self.device_group = device_group or cpu_group
        self.unique_name = unique_name
        self._all2all_backend = all2all_backend or self.default_backend
        self.rank = dist.get_rank(cpu_group)
        self.world_size = dist.get_world_size(cpu_group)
        self.dp_group: Any = None
        self.tp_group: Any = None
        self._manager: All2AllManagerBase | None = None
        self._lock = threading.RLock()
        self._closed = False

    @property
    def is_ep_communicator(self) -> bool:
        """Whether this communicator belongs to an expert-parallel group; only those have a manager."""
        return self.unique_name.split(":")[0] == "ep"

    @property
    def all2all_backend(self) -> str:
        """Backend of the manager. Another one can be assigned until the first access to the manager.

        Raises:
            StateError: the assignment comes later.
        """
        return self._all2all_backend

    @all2all_backend.setter
    def all2all_backend(self, name: str) -> None:
        with self._lock:
            if self._manager is not None and name != self._all2all_backend:
                raise StateError(
                    f"all2all_backend to stay {self._all2all_backend!r} once the manager has been made",
                    repr(name),
                    "Assign it before the first access to all2all_manager, or assign a manager to all2all_manager.",
                )
            self._all2all_backend = name

    @property
    def all2all_manager(self) -> All2AllManagerBase:
        """The manager of `all2all_backend`, made on first access, which is collective; allocates no device memory.

        Assigning one replaces it. The communicator owns the manager it is given: it destroys the one it held before,
        and the last one in `destroy()`.

        Raises:
            UnsupportedError: not an expert-parallel communicator.
            ClosedError: after `destroy()`.
            UnknownNameError: no such backend.
            MissingPackageError: the backend needs a package that is not installed.
        """
        with self._lock:
            self._check_usable()
            if self._manager is None:
                manager = self._make_manager()
                manager.device = self.device
                if self.device_group is not self.cpu_group:
                    manager.device_group = self.device_group
                manager.dp_group, manager.tp_group = self.dp_group, self.tp_group
                self._manager = manager
            return self._manager

    @all2all_manager.setter
    def all2all_manager(self, manager: All2AllManagerBase) -> None:
        with self._lock:
            self._check_usable()
            replaced, self._manager = self._manager, manager
            if replaced is not None and replaced is not manager:
                replaced.destroy()

    def _make_manager(self) -> All2AllManagerBase:
        from ep_a2a.managers.registry import create_manager

        return create_manager(self.all2all_backend, self.cpu_group)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Sends tokens to the ranks of their experts, by the manager's `dispatch`."""
        return self.all2all_manager.dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """Brings the experts' results back and sums them, by the manager's `combine`."""
        return self.all2all_manager.combine(*args, **kwargs)

    def destroy(self) -> None:
        """Destroys the manager, if there is one; idempotent. Leaves the groups to their maker."""
        with self._lock:
            self._closed = True
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.destroy()

    def _check_usable(self) -> None:
        if not self.is_ep_communicator:
            raise UnsupportedError(
                "an expert-parallel communicator, which alone has an all-to-all manager",
                f"the communicator of {self.unique_name!r}",
                "Use get_ep_group().device_communicator.",
            )
        if self._closed:
            raise ClosedError(
                f"an open communicator of {self.unique_name!r}",
                "one that was destroyed",
                "Call init_dist_env(...) again and ask get_ep_group() anew.",
            )
