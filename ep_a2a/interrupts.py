"""Holds back Ctrl-C while something runs that must not stop in the middle."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Blocks SIGINT in this thread meanwhile; one that has come is seen at the end.

    Processes that are started meanwhile never see SIGINT, unless they unblock it: they inherit the mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
