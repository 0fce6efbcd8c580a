"""Whether code that lies in a folder can be trusted: only this user, or root, can have put it there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

ROOT_USER = 0


def why_unsafe(folder: str | Path) -> str:
    """Why another user may have written what lies in `folder`; "" where only this user can have.

    The folder itself must belong to this user, and so must, or to root, each folder above it: who may rename one of
    those may put another in its place. None may be writable by everybody, unless it is sticky, as /tmp is, and above.
    Of a folder that is not there yet, those above are judged. Groups are not looked at: most users have one of
    their own.
    """
    path = Path(os.path.realpath(folder))
    user = os.geteuid()
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place} cannot be looked at: {error.strerror}"
        owners = (user,) if place == path else (user, ROOT_USER)
        if status.st_uid not in owners:
            return f"{place} belongs to user {status.st_uid}, and this is user {user}"
        sticky_above = place != path and status.st_mode & stat.S_ISVTX
        if status.st_mode & stat.S_IWOTH and not sticky_above:
            return f"everybody may write to {place}"
    return ""
