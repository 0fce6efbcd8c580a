"""Decides whether code in a folder can be trusted: only this user, or root, can have put it there."""

import os
import stat
from pathlib import Path

ROOT_USER = 0


def is_trusted(status: os.stat_result) -> bool:
    """Whether a file belongs to this user or to root."""
    return status.st_uid in (os.geteuid(), ROOT_USER)


def why_unsafe(folder: str | Path) -> str:
    """Returns why another user may have written into `folder`; "" where only this user can have.

    The folder must belong to this user. Each folder above it must belong to this user or root, since its owner could
    put another folder in place. None may be writable by everybody, except sticky folders above it, as /tmp is. Where
    the folder does not exist, the folders above it are judged. Groups are not judged: most users have their own.
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
