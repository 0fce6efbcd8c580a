"""Base of the managers on other projects' libraries: checks before the library's code runs, and handles."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

from ep_a2a.config.handle_kwargs import config_from_handle_kwargs
from ep_a2a.errors import EpA2AError, UnsupportedError
from ep_a2a.managers.availability import device_problem
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.memory.device_groups import DeviceGroups
from ep_a2a.ops.base import agree_on_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.external.libraries import Library
    from ep_a2a.managers.external.library_op import LibraryDispatchCombineOp
    from ep_a2a.managers.external.single_group_guard import SingleGroupGuard
    from ep_a2a.topology import Topology


class LibraryAll2AllManager(All2AllManagerBase):
    """A backend on a library that the user has installed. Tokens are exchanged through ops only.

    A subclass names the library, declares its capabilities and builds ops. Construction imports the library.

    Raises:
        MissingPackageError: the library is not installed, too old, or cannot be imported; the error says which.
    """

    library: ClassVar[Library]

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        self.library.require()
        super().__init__(cpu_group, tcp_store_group)
        self._groups: DeviceGroups | None = None

    @property
    def groups(self) -> DeviceGroups:
        """Process groups by device; made on first use, on every rank."""
        if self._groups is None:
            self._groups = DeviceGroups(self.cpu_group, self.device_group)
        return self._groups

    def get_handle(self, kwargs: Mapping[str, Any], index: int = 0) -> LibraryDispatchCombineOp:
        """Returns the op for these kwargs, on the library's native object. Collective when it is new.

        Args:
            kwargs: see config_from_handle_kwargs.
            index: ops whose steps overlap need different indices.

        Raises:
            UnsupportedError: the backend's capabilities or this machine exclude the config; raised on all ranks.
            UnknownNameError, ConfigError: a kwarg is unknown or impossible.
            ConfigMismatchError, RankTimeoutError: the ranks do not build the same op together.
        """
        self._require_open()

        def make(**kwargs: Any) -> LibraryDispatchCombineOp:
            self._device_in_use = True
            topology = self.topology(kwargs.get("gpu_per_node"))
            kwargs.setdefault("gpu_per_node", topology.gpu_per_node)
            config, error = None, None
            try:
                config = config_from_handle_kwargs(kwargs, topology.internode)
                error = self._refusal(config, topology) or self._refused_index(index)
            except EpA2AError as own:
                # the other ranks would wait for this one
                error = own
            agree_on_config(config, self.groups.rendezvous, index, error)
            assert config is not None
            guard = self._group_guard(topology)
            if guard is not None:
                guard.join(self.cpu_group, self._set_up)
            return self._build(config, topology, index)

        op: LibraryDispatchCombineOp = self.handle_cache.get_or_create(kwargs, make, index)
        return op

    def _refusal(self, config: EpDispatchCombineConfig, topology: Topology) -> EpA2AError | None:
        """Returns why this rank cannot build the op, or None."""
        problem = device_problem(self.capabilities, self.device.type)
        if problem is not None:
            return UnsupportedError(
                f"a machine for backend {self.backend!r}",
                problem,
                "Use a backend that `ep-a2a backends` has available.",
            )
        guard = self._group_guard(topology)
        second = None if guard is None else guard.refusal(self.cpu_group)
        return second or self.capabilities.refusal(self.backend, config, topology.num_nodes)

    def _group_guard(self, topology: Topology) -> SingleGroupGuard | None:
        """Returns the guard of a library that serves one group per process; None for other libraries."""
        return None

    def _set_up(self) -> None:
        """Sets the library up for the group, once per process, if there is `_group_guard`. Collective."""

    def _refused_index(self, index: int) -> EpA2AError | None:
        if not index or self.capabilities.micro_batches:
            return None
        return UnsupportedError(
            f"index 0, which is what backend {self.backend!r} has memory for",
            f"index {index}",
            "Do not let steps of micro-batches overlap, or use the backend 'ep_a2a'.",
        )

    @abc.abstractmethod
    def _build(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> LibraryDispatchCombineOp:
        """Returns the op. Collective. The library allocates here, apart from other indices' memory."""

    @classmethod
    def kernel_for(cls, num_nodes: int, max_num_tokens: int | None = None) -> tuple[str, str]:
        """Returns the library's module, and its distribution with the version."""
        return cls.library.module, f"{cls.backend} uses {cls.library.distribution} {cls.library.version or ''}".rstrip()

    def _release(self) -> None:
        if self._groups is not None:
            self._groups.close()
