"""A file that the ranks of one host share: locks that show which processes live, and lines that they append."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from ep_a2a.errors import UntrustedFolderError
from ep_a2a.memory.private_files import create_private, in_private_folder, new_name, open_private, remove_private

FLOCK = "hhqqi4x"
"""struct flock of Linux: type, whence, start, length, holder."""
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Returns the random id of the running kernel, equal for processes of one host; "" where it cannot be read."""
    with contextlib.suppress(OSError):
        return BOOT_ID_PATH.read_text().strip()
    return ""


class HostRecord:
    """The shared file of one group's ranks on one host. `join` opens or makes it.

    The process of a rank holds a lock on byte `rank` of the file. Linux releases the lock when the process ends. While
    a rank waits on the host, it holds a second lock, on byte `world_size + rank`.

    Lines are JSON objects. Appends are atomic and ordered, so all ranks read the same lines in the same order.

    Args:
        descriptor: of the file; closed by `close`.
        name: its name in the private folder, until `unlink`.
        rank, world_size: this rank's place in the group.
    """

    def __init__(self, descriptor: int, name: str, rank: int, world_size: int) -> None:
        self.rank, self._world_size = rank, world_size
        self._descriptor, self._name, self._pid = descriptor, name, os.getpid()
        self._num_read, self._has_name = 0, True
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @classmethod
    def join(cls, store: distributed_c10d.Store, rank: int, world_size: int) -> HostRecord:
        """Opens the file of this host, or makes it where this rank is the first.

        The first rank of a host publishes the name of its file in the store. Ranks that cannot open or lock that file
        (another container, another user) publish one of their own, and count as another host; so does a rank without
        shared memory.

        Raises:
            UntrustedFolderError: this user's folder in shared memory is not this user's alone.
        """
        name = new_name()
        try:
            descriptor = create_private(in_private_folder(name), 0)
        except OSError:
            # a file that no other rank can open
            descriptor = os.memfd_create(name)
        own, found, number = cls(descriptor, name, rank, world_size), None, 0
        while found is None:
            first = store.compare_set(f"host/{host_identity()}/{number}", "", name).decode(errors="replace")
            found = own if first == name else cls._open(first, rank, world_size)
            number += 1
        if found is not own:
            own.close()
        return found

    @classmethod
    def _open(cls, name: str, rank: int, world_size: int) -> HostRecord | None:
        """The file of another rank; None where it cannot be opened, or another process has this rank's lock there."""
        try:
            descriptor = open_private(in_private_folder(name), 0)
        except (OSError, UntrustedFolderError):
            return None
        try:
            return cls(descriptor, name, rank, world_size)
        except OSError:
            os.close(descriptor)
            return None

    def has_ended(self, rank: int) -> bool:
        """Whether no process holds the lock of a rank that has joined."""
        return self._holder(rank) is None

    def waits(self, rank: int) -> bool:
        """Whether `rank` is blocked in a host-side exchange, inside `waiting`, and its process runs."""
        return self._holder(self._world_size + rank) is not None and not self.is_stopped(rank)

    def is_stopped(self, rank: int) -> bool:
        """Whether the process of `rank` stands still, by a signal or a debugger; False where /proc does not say."""
        return self._state(rank) in (b"t", b"T")

    def computes(self, rank: int) -> bool:
        """Whether the process of `rank` runs, or would if it had a core; False where /proc does not say."""
        return self._state(rank) == b"R"

    def _state(self, rank: int) -> bytes:
        # no process has the number that stands for none; the state follows the name in brackets, of any characters
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self._holder(rank) or 0}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return b""

    def _holder(self, byte: int) -> int | None:
        """The process that holds the lock of a byte; None without one, 0 where this process cannot see it."""
        request = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, request))
        return None if kind == fcntl.F_UNLCK else int(pid)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, this rank waits for others on the host, so it is not late."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._world_size + self.rank)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._world_size + self.rank)

    def append(self, line: dict[str, Any]) -> None:
        """Appends a line; a full shared memory loses it, a forked child writes nothing."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def new_lines(self) -> list[dict[str, Any]]:
        """Returns the lines since the last call; leaves out what is no JSON object."""
        size = os.fstat(self._descriptor).st_size
        if size == self._num_read:
            return []
        text = os.pread(self._descriptor, size - self._num_read, self._num_read)
        whole = text[: text.rfind(b"\n") + 1]
        self._num_read += len(whole)
        return [found for line in whole.splitlines() if isinstance(found := parsed(line), dict)]

    def unlink(self) -> None:
        """Takes the file's name away. Ranks that come later cannot open the file."""
        if self._has_name:
            self._has_name = False
            remove_private(self._name)

    def close(self) -> None:
        """Leaves: the others see this rank as gone. A forked child closes its copy only."""
        if os.getpid() == self._pid:
            self.unlink()
        os.close(self._descriptor)


def parsed(text: bytes) -> Any:
    """Reads a rank's text as JSON; None where it is none, since strangers can write to the store and to its files."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
