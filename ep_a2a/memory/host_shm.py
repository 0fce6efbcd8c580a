"""Symmetric memory on CPU: one shared-memory file per rank, mapped by all ranks and then unlinked."""

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import torch

from ep_a2a.errors import StateError
from ep_a2a.memory import private_files
from ep_a2a.memory.private_files import in_private_folder, refusals_named
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.symmetric import SymmetricMemory

ONE_FOLDER = "Ranks of one host need one /dev/shm: run them in one container, or with --ipc=host."

_living: weakref.WeakSet[SymmetricMemory] = weakref.WeakSet()


def allocate_host_shared(rendezvous: Rendezvous, num_bytes: int) -> SymmetricMemory:
    """Allocate a zeroed region of num_bytes in shared memory for every rank, mapped by all ranks. Collective.

    The memory lives until its last tensor is gone, so a forgotten tensor cannot crash the process.
    """
    own_name = private_files.new_name()

    def create() -> None:
        with refusals_named(f"{num_bytes} bytes of shared memory in {private_files.SHM_DIRECTORY}"):
            private_files.remove_stale_files()
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
        private_files.remove_private(own_name)
    addresses = tuple(tensor.data_ptr() for tensor in maps)
    memory = SymmetricMemory(maps[rendezvous.rank], addresses, "host shared memory", maps.clear)
    _living.add(memory)
    return memory


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


def _create(path: Path, num_bytes: int) -> None:
    os.close(private_files.create_private(path, num_bytes))


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    descriptor = private_files.open_private(path, num_bytes)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)
