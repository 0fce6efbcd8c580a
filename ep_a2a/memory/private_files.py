"""Files of this user alone in shared memory: their folder, their names, who may open them, what the dead leave."""

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ep_a2a.errors import HostMemoryError, UntrustedFolderError

SHM_DIRECTORY = Path("/dev/shm")
PID_NAMESPACE = Path("/proc/self/ns/pid")


def private_folder() -> Path:
    """The folder in shared memory that holds this user's files; makes it where there is none.

    Raises:
        UntrustedFolderError: its name belongs to a link, to a file or to another user, or others may enter it.
        OSError: it cannot be made.
    """
    folder = SHM_DIRECTORY / f"ep_a2a_{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or stat.S_IMODE(status.st_mode) & 0o077:
        raise UntrustedFolderError(
            f"a folder {folder} that only user {os.geteuid()} can enter",
            f"{stat.filemode(status.st_mode)} of user {status.st_uid}",
            "Its owner or root can remove it; a container without --ipc=host has a /dev/shm of its own.",
        )
    return folder


def in_private_folder(name: str) -> Path:
    """The path of a file in `private_folder`. A peer may have made the name up, so only its last part counts.

    Raises:
        UntrustedFolderError: as `private_folder`.
        OSError: as `private_folder`, or no file can have this name.
    """
    if not isinstance(name, str) or "\0" in name:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), repr(name))
    return private_folder() / Path(name).name


def new_name() -> str:
    """A name that nobody can guess and that tells `remove_stale_files` whose it is."""
    return f"{own_prefix()}{secrets.token_hex(16)}"


def own_prefix() -> str:
    """What names of this process's files begin with: its PID namespace and its number there."""
    return f"{_process_namespace()}_{os.getpid()}_"


def remove_stale_files() -> None:
    """Remove files and folders of this user whose process ended before it removed them.

    Process numbers are comparable inside one PID namespace only, so files of other containers stay.
    """
    with contextlib.suppress(OSError, UntrustedFolderError):
        for path in private_folder().glob(f"{_process_namespace()}_*_*"):
            if Path("/proc", path.name.split("_")[1]).exists():
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _process_namespace() -> int:
    return PID_NAMESPACE.stat().st_ino


def create_private(path: Path, num_bytes: int) -> int:
    """Create a file of zeros that only this user can open, and return its descriptor.

    Raises:
        OSError: there is no room, or something has this name.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # reserves the pages now: a full /dev/shm is an error here instead of a SIGBUS in a kernel
        if num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def remove_private(name: str) -> None:
    """Remove a file of the private folder, where there is one of this name."""
    with contextlib.suppress(OSError, UntrustedFolderError):
        in_private_folder(name).unlink()


def open_private(path: Path, num_bytes: int) -> int:
    """Open a file that a rank of this user has made, and return its descriptor. Others may write names to the store.

    Raises:
        UntrustedFolderError: it is not such a file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    private = stat.S_ISREG(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not private or status.st_uid != os.geteuid() or status.st_size < num_bytes:
        os.close(descriptor)
        raise UntrustedFolderError(
            f"a file of {num_bytes} bytes at {path} that only user {os.geteuid()} can open",
            f"{status.st_size} bytes of user {status.st_uid}, {stat.filemode(status.st_mode)}",
            "Run all ranks of a host as one user; look who else writes to the store of the process group.",
        )
    return descriptor


@contextlib.contextmanager
def refusals_named(expected: str, remedy: str | None = None) -> Iterator[None]:
    """Turns a refusal of the system into a HostMemoryError."""
    try:
        yield
    except OSError as cause:
        if cause.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "Raise the limit of open files (`ulimit -n`): each op holds some for each rank. Close unused ops."
        raise HostMemoryError(expected, str(cause), remedy) from cause
