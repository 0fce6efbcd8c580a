"""Guards libraries that serve one group of ranks per process: refuses a second group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup


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
