"""Symmetric memory on CPU: one shared-memory file per rank, mapped by all ranks and then unlinked."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import shutil
import stat
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ep_a2a.errors import HostMemoryError, StateError, UntrustedFolderError
from ep_a2a.memory.symmetric import SymmetricMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.memory.rendezvous import Rendezvous

SHM_DIRECTORY = Path("/dev/shm")
PID_NAMESPACE = Path("/proc/self/ns/pid")
ONE_FOLDER = "Ranks of one host need one /dev/shm: run them in one container, or with --ipc=host."

_living: weakref.WeakSet[SymmetricMemory] = weakref.WeakSet()


def allocate_host_shared(rendezvous: Rendezvous, num_bytes: int) -> SymmetricMemory:
    """Allocate a zeroed region of num_bytes in shared memory for every rank, mapped by all ranks. Collective.

    The memory lives until its last tensor is gone, so a forgotten tensor cannot crash the process.
    """
    own_name = new_name()

    def create() -> None:
        with refusals_named(f"{num_bytes} bytes of shared memory in {SHM_DIRECTORY}"):
            remove_stale_files()
            _create(in_private_folder(own_name), num_bytes)

    def map_all(names: list[str]) -> list[torch.Tensor]:
        with refusals_named("every rank's shared memory to be mappable", ONE_FOLDER):
            return [_map(in_private_folder(name), num_bytes) for name in names]

    try:
        # the others map this rank's file before it is removed
        with rendezvous.telling("sharing memory"):
            rendezvous.attempt("creating shared memory", create)
            names = rendezvous.exchange("shared memory names", own_name)
            maps = rendezvous.attempt("mapping shared memory", lambda: map_all(names))
    finally:
        with contextlib.suppress(OSError, UntrustedFolderError):
            in_private_folder(own_name).unlink()
    addresses = tuple(tensor.data_ptr() for tensor in maps)
    memory = SymmetricMemory(maps[rendezvous.rank], addresses, "host shared memory", maps.clear)
    _living.add(memory)
    return memory


@contextlib.contextmanager
def refusals_named(expected: str, remedy: str | None = None) -> Iterator[None]:
    """Turns a refusal of the system into a HostMemoryError."""
    try:
        yield
    except OSError as cause:
        raise HostMemoryError(expected, str(cause), _remedy_of(cause) or remedy) from cause


def _remedy_of(cause: OSError) -> str | None:
    """The remedy for too many open files; None for other errors."""
    if cause.errno in (errno.EMFILE, errno.ENFILE):
        return "Raise the limit of open files (`ulimit -n`): each op holds some for each rank. Close unused ops."
    return None


def put(target: int, source: int, num_bytes: int, rank: int) -> None:
    """Copy bytes to a rank's memory, as NVSHMEM's puts do: `target` is this rank's address of the same offset.

    Raises:
        StateError: there is no symmetric memory at `target`.
    """
    ctypes.memmove(_place_of(target, rank), source, num_bytes)


def count(counter: int, rank: int) -> None:
    """Add one to an int64 in a rank's memory: `counter` is this rank's address of the same offset. One writer only."""
    place = ctypes.c_int64.from_address(_place_of(counter, rank))
    place.value += 1


def _place_of(address: int, rank: int) -> int:
    for memory in _living:
        offset_bytes = address - memory.local.data_ptr() if not memory.closed else -1
        if 0 <= offset_bytes < memory.num_bytes:
            return memory.peer_addresses[rank] + offset_bytes
    raise StateError(
        "an address in symmetric memory of this process", hex(address), "Report this as an error of ep_a2a."
    )


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


def open_private(path: Path, num_bytes: int) -> int:
    """Open a file that a rank of this user has made, and return its descriptor.

    Raises:
        UntrustedFolderError: it is not such a file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_private(path, os.fstat(descriptor), num_bytes)
    except UntrustedFolderError:
        os.close(descriptor)
        raise
    return descriptor


def _require_private(path: Path, status: os.stat_result, num_bytes: int) -> None:
    """Raise UntrustedFolderError unless a rank of this user made the file: others may write names to the store."""
    private = stat.S_ISREG(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if not private or status.st_uid != os.geteuid() or status.st_size < num_bytes:
        raise UntrustedFolderError(
            f"a file of {num_bytes} bytes at {path} that only user {os.geteuid()} can open",
            f"{status.st_size} bytes of user {status.st_uid}, {stat.filemode(status.st_mode)}",
            "Run all ranks of a host as one user; look who else writes to the store of the process group.",
        )


def _create(path: Path, num_bytes: int) -> None:
    os.close(create_private(path, num_bytes))


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    descriptor = open_private(path, num_bytes)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
