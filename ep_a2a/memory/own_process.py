"""Keeps forked children away from what their parent shares with other ranks."""

from __future__ import annotations

import os

from ep_a2a.errors import ForkedProcessError


class OwnProcess:
    """The process that made an object whose memory and connections belong to it.

    A forked child has the same memory mapped and the same connection to the store: its calls would be taken for its
    parent's.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this is that process, and not a forked child of it."""
        return os.getpid() == self._pid

    def require(self, what: str) -> None:
        """Raises ForkedProcessError in a forked child.

        Args:
            what: the object, for the error's text.
        """
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"{what} to be used by process {self._pid}, which made it", f"process {os.getpid()}"
            )
