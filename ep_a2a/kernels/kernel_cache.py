"""Checks the folder of compiled kernels: they are code, so no other user may write to it."""

from __future__ import annotations

import functools

from triton import knobs

from ep_a2a.errors import UntrustedFolderError
from ep_a2a.path_security import why_unsafe


def check_kernel_cache() -> None:
    """Returns where Triton's cache belongs to this user; to be called before a kernel is compiled or loaded.

    Raises:
        UntrustedFolderError: another user may have put code there.
    """
    _check(knobs.cache.dir)


@functools.cache
def _check(folder: str) -> None:
    problem = why_unsafe(folder)
    if problem:
        raise UntrustedFolderError(
            f"Triton's cache {folder}, from which code is executed, to be this user's alone", problem,
            "Set TRITON_CACHE_DIR to a folder of this user, or mend the owner and mode (chmod o-w).",
        )  # fmt: skip
