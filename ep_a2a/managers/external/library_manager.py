"""Base of the managers on other projects' libraries: checks before the library's code runs, and handles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from ep_a2a.errors import UnsupportedError
from ep_a2a.managers.base import All2AllManagerBase
from ep_a2a.managers.capabilities import Capabilities, device_problem
from ep_a2a.ops.config_agreement import agree_on_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.external.libraries import Library
    from ep_a2a.managers.external.library_op import LibraryDispatchCombineOp
    from ep_a2a.topology import Topology


EXPERT_ROWS = Capabilities(
    layouts=("expert_major",),
    row_order="any",
    ids="none",
    weights_applied_by="combine",
    source_positions="no",
    weight_sums=False,
    dispatch_casts=("none", "fp8_per_1x128"),
    scale_formats=("float32", "float32_power_of_two"),
    even_experts=True,
    rdma="across nodes",
)
"""Capabilities that backends share whose dispatch returns rows by expert."""


class SingleGroupGuard:
    """The group that a library was set up for in this process, for the life of it.

    Args:
        library: its name, for errors.
        by_ranks: another group of the same ranks is accepted. Without it only the first group object is, because the
            library keeps using that.
    """

    def __init__(self, library: str, *, by_ranks: bool) -> None:
        self._library, self._by_ranks = library, by_ranks
        self._group: ProcessGroup | None = None
        self._ranks: list[int] = []

    def check(self, group: ProcessGroup) -> None:
        """Raises UnsupportedError where this process cannot use the library in `group`; other ranks may be able to."""
        ranks = dist.get_process_group_ranks(group)
        if self._group is None or self._group is group or (self._by_ranks and self._ranks == ranks):
            return
        raise UnsupportedError(
            f"one process group for {self._library} in a process, that of global ranks {self._ranks}",
            f"a second one, of global ranks {ranks}",
            "Use the first group, or the backend 'ep_a2a'.",
        )

    def join(self, group: ProcessGroup, set_up: Callable[[], None]) -> None:
        """Calls `set_up` and keeps the group, unless this process has one already; see `check`."""
        if self._group is None:
            set_up()
            self._group, self._ranks = group, dist.get_process_group_ranks(group)


class LibraryAll2AllManager(All2AllManagerBase):
    """A backend on a library that the user has installed. Tokens are exchanged through ops only.

    A subclass names the library and the class of its ops, and declares its capabilities. Construction imports the
    library.

    Attributes:
        op_type: the class of the ops.
        group_guard: of a library that serves one group per process; None for other libraries.

    Raises:
        MissingPackageError: the library is not installed, too old, or cannot be imported; the error says which.
    """

    library: ClassVar[Library]
    op_type: ClassVar[type[LibraryDispatchCombineOp]]
    group_guard: ClassVar[SingleGroupGuard | None] = None

    def __init__(self, cpu_group: ProcessGroup, tcp_store_group: Any = None) -> None:
        self.library.require()
        super().__init__(cpu_group, tcp_store_group)

    def _check(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> None:
        problem = device_problem(self.capabilities, self.device.type)
        if problem is not None:
            raise UnsupportedError(
                f"a machine for backend {self.backend!r}",
                problem,
                "Use a backend that `ep-a2a backends` has available.",
            )
        guard = self._group_guard(topology)
        if guard is not None:
            guard.check(self.cpu_group)
        super()._check(config, topology, index)

    def _make_op(self, config: EpDispatchCombineConfig, topology: Topology, index: int) -> LibraryDispatchCombineOp:
        agree_on_config(config, self._rendezvous, index)
        guard = self._group_guard(topology)
        if guard is not None:
            guard.join(self.cpu_group, self._set_up)
        return self.op_type(self, config, topology, index)

    def _group_guard(self, topology: Topology) -> SingleGroupGuard | None:
        return self.group_guard

    def _set_up(self) -> None:
        """Sets the library up for the group, once per process, if there is a guard. Collective."""

    @classmethod
    def kernel_for(cls, num_nodes: int, max_tokens: int | None = None) -> tuple[str, str]:
        """Returns the library's module, and its distribution with the version."""
        return cls.library.module, f"{cls.backend} uses {cls.library.distribution} {cls.library.version or ''}".rstrip()
