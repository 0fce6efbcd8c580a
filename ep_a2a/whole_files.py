"""Reads the files that users name, and writes files whole or not at all, through no link of another user."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ep_a2a.errors import ConfigError, UntrustedFolderError
from ep_a2a.path_security import is_trusted

T = TypeVar("T")

MAX_READ_BYTES = 64 << 20
MAX_LINKS = 40
"""Links that Linux follows in one path."""


def read_file(path: str | Path, what: str, remedy: str, parse: Callable[[str], T]) -> T:
    """Returns what a parser makes of a text file that the user named.

    Args:
        path: the file. what: kind of the file, for errors. remedy: of errors.
        parse: takes the text; raises ValueError of text that it cannot use.

    Raises:
        ConfigError: it is no regular file, larger than MAX_READ_BYTES, not in UTF-8, or cannot be read or parsed.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            # a pipe would hold who reads it
            raise ValueError(f"no regular file: {stat.filemode(mode)}")
        with Path(path).open("rb") as file:
            content = file.read(MAX_READ_BYTES + 1)
        if len(content) > MAX_READ_BYTES:
            raise ValueError(f"more than {MAX_READ_BYTES >> 20} MiB")
        return parse(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        found = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
        found = getattr(error, "strerror", None) or found
        raise ConfigError(f"{what} at {str(path)!r}", found, remedy) from error


def write_whole(path: Path, content: bytes) -> None:
    """Put a file into place: written beside it under a random name, then renamed.

    A file of this user keeps its permissions. Links of this user and of root are followed. Devices and pipes are
    written to directly.

    Raises:
        UntrustedFolderError: the path leads through a link, or to a pipe or device, of another user.
        OSError: it cannot be written.
    """
    target = resolved(path)
    if is_special(path):
        # by its own name: what /dev/stdout leads to has no other
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb") as file:
            require_trusted(path, os.fstat(file.fileno()))
            file.write(content)
        return
    temporary, descriptor = _new_beside(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            with contextlib.suppress(FileNotFoundError):
                before = target.lstat()
                if before.st_uid == os.geteuid():
                    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def check_can_write(path: Path) -> None:
    """Raise what `write_whole` would, as far as can be known before; leave nothing behind."""
    target = resolved(path)
    if is_special(path):
        require_trusted(path, path.stat())
        return
    # the name itself is tried, too: it may be longer than the file system takes
    with contextlib.suppress(FileNotFoundError):
        target.stat()
    temporary, descriptor = _new_beside(target)
    os.close(descriptor)
    temporary.unlink()


def is_special(path: Path) -> bool:
    """Whether a path leads to a device or a pipe, whose place no file can take."""
    return path.exists() and not path.is_file()


def resolved(path: Path) -> Path:
    """The path without links; it need not exist.

    Raises:
        UntrustedFolderError: a link on the way belongs to neither this user nor root.
        OSError: there are too many links.
    """
    found, left = Path("/"), list(reversed(Path.cwd().joinpath(path).parts[1:]))
    num_links = 0
    while left:
        part = left.pop()
        if part == "..":
            found = found.parent
            continue
        place = found / part
        try:
            status = place.lstat()
        except FileNotFoundError:
            found = place
            continue
        if not stat.S_ISLNK(status.st_mode):
            found = place
            continue
        require_trusted(place, status)
        num_links += 1
        if num_links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        aim = place.readlink()
        if aim.is_absolute():
            found, aim = Path("/"), aim.relative_to("/")
        left += reversed(aim.parts)
    return found


def require_trusted(path: Path, status: os.stat_result) -> None:
    """Raise UntrustedFolderError unless what stands at `path` belongs to this user or root."""
    if not is_trusted(status):
        raise UntrustedFolderError(
            f"{path} to be a file of user {os.geteuid()}, or nothing",
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}",
            "Name a file in a folder of your own.",
        )


def _new_beside(path: Path) -> tuple[Path, int]:
    """Create a file that nobody can have planted, with the permissions of a new file; its path and descriptor."""
    temporary = path.with_name(f".ep_a2a_{secrets.token_hex(16)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
    return temporary, os.open(temporary, flags, 0o666)
