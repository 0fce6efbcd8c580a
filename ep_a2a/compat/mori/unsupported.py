"""Names of MORI that have no counterpart here: how they say so."""

from __future__ import annotations

from ep_a2a.errors import UnsupportedError


def refused(what: str, remedy: str) -> UnsupportedError:
    """The error of a call that MORI has and this package has not.

    Args:
        what: MORI's name for it, with what it would have to do.
        remedy: what the caller can do instead.
    """
    return UnsupportedError(f"mori on MORI's own kernels for {what}", "mori on ep_a2a, which has no such thing", remedy)
