"""Symmetric memory among real processes: what is shared, what is refused, and that nothing is left behind."""

import ctypes
import errno
import gc
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ep_a2a import errors, shmem
from ep_a2a.memory import host_shm, private_files
from ep_a2a.memory.arena import Arena, BlockSizes, allocate_symmetric
from ep_a2a.memory.private_files import refusals_named
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.symmetric import SymmetricMemory
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, built_op, make_inputs, make_op, run_step
from tests.cases.op_checks import raised
from tests.shared_files import files_of, shared_files

NUM_BYTES = 100_000
GIB = 1 << 30
SIZES = BlockSizes(own=512, shared={"dispatch": 1024}, local_own=64, local_shared={"local": 128}, record_words=10)


def memory_at(address: int, num_bytes: int) -> torch.Tensor:
    """The bytes at an address of this process, as kernels reach them."""
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def allocate(context: RankContext, num_bytes: int = NUM_BYTES) -> SymmetricMemory:
    return allocate_symmetric(Rendezvous(context.group), context.device, num_bytes)


# --- one region per rank, seen by all ---


def write_to_every_peer(context: RankContext) -> None:
    rendezvous, world = Rendezvous(context.group), range(context.world_size)
    memory = allocate_symmetric(rendezvous, context.device, NUM_BYTES)
    assert (memory.local.dtype, memory.local.shape) == (torch.uint8, (NUM_BYTES,))
    assert (memory.num_bytes, len(memory.peer_addresses), memory.kind) == (NUM_BYTES, len(world), "host shared memory")
    assert memory.peer_addresses[context.rank] == memory.local.data_ptr()
    assert not any(address % 4096 for address in memory.peer_addresses)
    assert not memory.local.any()
    rendezvous.barrier("looked at")
    for peer, address in enumerate(memory.peer_addresses):
        region = memory_at(address, NUM_BYTES)
        region[context.rank] = 10 * context.rank + peer
        region[NUM_BYTES - 1 - context.rank] = 100 + context.rank
    rendezvous.barrier("written")
    assert memory.local[: len(world)].tolist() == [10 * source + context.rank for source in world]
    assert memory.local[-len(world) :].tolist() == [100 + source for source in reversed(world)]
    assert not memory.local[len(world) : -len(world)].any()
    rendezvous.barrier("read")
    kept = memory.local[:4]
    memory.close()
    memory.close()
    assert memory.closed
    # memory lives as long as a tensor of it: a forgotten one must not crash the process
    assert int(kept.fill_(7).sum()) == 28


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_reaches_every_region(ranks, world_size):
    ranks(write_to_every_peer, world_size)


# --- what is refused ---


def ask_for_unequal_sizes(context: RankContext) -> None:
    sizes = [[NUM_BYTES + (rank == 1), "cpu"] for rank in range(context.world_size)]
    raised(errors.ConfigMismatchError, lambda: allocate(context, sizes[context.rank][0]), f"got by rank {sizes}")
    allocate(context).close()


def test_unequal_sizes_are_an_error_on_every_rank(ranks):
    ranks(ask_for_unequal_sizes, 3)


def fail_to_map_on_one_rank(context: RankContext) -> None:
    # a file that the others have removed, or that lies in another container's /dev/shm
    kind, words = errors.HostMemoryError, ("No such file", "--ipc=host")
    if context.rank != 1:
        kind, words = (
            errors.ConfigMismatchError,
            ("No such file", "mapping shared memory to succeed on every rank; got rank 1"),
        )
    failing = OSError(errno.ENOENT, os.strerror(errno.ENOENT)) if context.rank == 1 else None
    with mock.patch.object(host_shm, "_map", side_effect=failing, wraps=host_shm._map):
        raised(kind, lambda: allocate(context), *words)
    Rendezvous(context.group).barrier("failed")
    assert files_of(os.getpid()) == []
    allocate(context).close()


def test_memory_that_one_rank_cannot_map_is_an_error_on_all(ranks):
    ranks(fail_to_map_on_one_rank, 3)


def fail_in_the_middle_of_an_op(context: RankContext, case: Case) -> None:
    """One rank gets the last one of an op's blocks only for the next op, which all that the others had got serves."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with Arena(context.group, context.device) as arena:
        with mock.patch.object(os, "posix_fallocate", wraps=os.posix_fallocate) as allocate_file:
            allocate_file.side_effect = [mock.DEFAULT] * 2 + [full if context.rank == 1 else mock.DEFAULT]
            kind = errors.HostMemoryError if context.rank == 1 else errors.ConfigMismatchError
            raised(kind, lambda: make_op(context, case, arena), "No space left")
            assert allocate_file.call_count == 3
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        shared = arena._shared_blocks[op.index]
        assert len(arena._shared_blocks) == 1
        assert {len(blocks) for blocks in (*shared.symmetric.values(), *shared.local.values())} == {1}


def test_an_op_that_one_rank_has_no_memory_for_leaves_it_to_the_next(ranks):
    ranks(fail_in_the_middle_of_an_op, 3, Case(world_size=3, num_experts=6, tokens=((4, 3, 5),)))


def ask_for_too_much(context: RankContext) -> None:
    space = os.statvfs(private_files.SHM_DIRECTORY)
    # more than the file system holds, not than is free: the kernel then refuses before it touches memory
    num_bytes = space.f_blocks * space.f_frsize + GIB
    text = str(raised(errors.HostMemoryError, lambda: allocate(context, num_bytes), "--shm-size"))
    assert "No space left" in text or os.strerror(errno.EFBIG) in text
    Rendezvous(context.group).barrier("refused")
    assert files_of(os.getpid()) == []
    allocate(context).close()


def test_a_full_shared_memory_is_an_error_on_every_rank(ranks):
    ranks(ask_for_too_much, 3)


def take_a_planted_file(context: RankContext) -> None:
    """Rank 1 announces another file than the one it made, as somebody who writes to the store could."""
    planted = private_files.in_private_folder(f"planted_{os.getpid()}")
    rendezvous = Rendezvous(context.group)
    exchange = rendezvous.exchange

    def lie(label: str, message: Any) -> list[Any]:
        return exchange(label, planted.name if label == "shared memory names" else message)

    if context.rank == 1:
        planted.write_bytes(bytes(NUM_BYTES))
        planted.chmod(0o666)
        rendezvous.exchange = lie  # type: ignore[method-assign]
    try:
        raised(errors.EpA2AError, lambda: allocate_symmetric(rendezvous, context.device, NUM_BYTES), "that only user")
    finally:
        planted.unlink(missing_ok=True)


def test_a_file_that_a_rank_cannot_have_made_is_refused(ranks):
    """tests/unit/test_private_files.py has others."""
    ranks(take_a_planted_file, 2)


# --- names in /dev/shm ---


def watch_names(context: RankContext, case: Case) -> Any:
    """What stands in /dev/shm while an op is made, and after."""
    seen: list[tuple[str, int, int]] = []
    original = host_shm._map

    def watched(path: Path, num_bytes: int) -> torch.Tensor:
        status = path.stat()
        seen.append((path.name, stat.S_IMODE(status.st_mode), status.st_size - num_bytes))
        return original(path, num_bytes)

    host_shm._map = watched
    mask = os.umask(0)
    try:
        with built_op(context, case) as op:
            # every rank has left its allocations, and its file names with them
            op.arena.rendezvous.barrier("op is made")
            left = [name for name, _, _ in seen if name in shared_files()]
            run_step(case, op, 0, context.device)
            return seen, left
    finally:
        os.umask(mask)
        host_shm._map = original


def test_files_are_private_unguessable_and_gone_while_the_op_lives(ranks):
    results = ranks(watch_names, 2, Case(world_size=2, tokens=((3, 5),)))
    names = [name for name, _, _ in results[0][0]]
    # three blocks, of two ranks each
    assert len(names) == len(set(names)) == 6
    # 128 random bits at the end
    assert all(re.fullmatch(r"\d+_\d+_[0-9a-f]{32}", name) for name in names)
    for seen, left in results:
        assert [name for name, _, _ in seen] == names
        assert {(mode, surplus) for _, mode, surplus in seen} == {(0o600, 0)}
        assert left == []


def test_files_and_folders_of_dead_processes_are_removed():
    """What a rank left that was killed between creating and unlinking; whoever allocates next removes it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    dead = [f"{namespace}_{process.pid}_{what}{os.getpid()}" for what in ("file", "folder")]
    kept = [f"{namespace}_{os.getpid()}_test", f"{namespace + 1}_{process.pid}_test{os.getpid()}"]
    paths = {name: private_files.in_private_folder(name) for name in (*dead, *kept)}
    try:
        for name, path in paths.items():
            if "folder" in name:
                path.mkdir()
                path /= "file"
            path.touch()
        private_files.remove_stale_files()
        assert [name for name, path in paths.items() if path.exists()] == kept
    finally:
        for name in kept:
            paths[name].unlink(missing_ok=True)


# --- arenas ---


def life_of_an_arena(context: RankContext, case: Case) -> None:
    arena = Arena(context.group, context.device)
    assert arena.num_bytes == 0
    memory = arena.acquire("key", 0, SIZES)
    assert arena.acquire("key", 0, SIZES) is memory
    num_bytes = arena.num_bytes
    assert num_bytes == 512 + 1024 + 64 + 128
    other = arena.acquire("other", 0, SIZES)
    assert other.symmetric["dispatch"] is memory.symmetric["dispatch"]
    assert other.symmetric["own"] is not memory.symmetric["own"]
    assert arena.num_bytes == num_bytes + 512 + 64
    apart = arena.acquire("key", 1, SIZES)
    assert apart.symmetric["dispatch"] is not memory.symmetric["dispatch"]
    first, second = arena.unshared_index(), arena.unshared_index()
    assert first != second
    assert max(first, second) < 0
    op = make_op(context, case, arena)
    arena.close()
    arena.close()
    assert (arena.closed, arena.num_bytes) == (True, 0)
    assert memory.symmetric["own"].closed
    assert apart.symmetric["own"].closed
    inputs = make_inputs(case, 0, context.rank)
    for call in (
        lambda: arena.acquire("key", 0, SIZES),
        lambda: make_op(context, case, arena),
        lambda: op.dispatch(inputs.tokens, None, None, inputs.ids),
        op.check,
        op.reset,
    ):
        raised(errors.ClosedError, call)


def test_arena_hands_out_shares_and_gives_back(ranks):
    ranks(life_of_an_arena, 2, Case(world_size=2))


def drop_many_ops(context: RankContext, case: Case) -> list[tuple[int, int, int, int, int]]:
    """(bytes of the arena, descriptors, mappings, keys of the store, resident bytes) after every 50 of 500 dropped ops.

    One op in 25 is dropped in the middle of a step.
    """
    seen, kept = [], []
    # an error that an earlier test has kept may hold an op until then
    gc.collect()
    with Arena(context.group, context.device) as arena:
        live = make_op(context, case, arena)
        for number in range(1, 501):
            op = make_op(context, case, arena)
            step = Step.dispatch(case, op, 0, context.device) if number % 25 == 0 else None
            # ranks collect their garbage at different times, some only when the next op is made
            kept[:] = [op] * (number % 4 == context.rank)
            del op, step
            if number % 50 == 0:
                # no memory of a dropped op is this one's
                run_step(case, live, number // 50, context.device)
                arena.rendezvous.barrier("dropped")
                maps = Path("/proc/self/maps").read_text().count(str(private_files.private_folder()))
                descriptors, keys = len(os.listdir("/proc/self/fd")), arena.rendezvous._store.num_keys()
                resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                # no rank writes keys while another one counts them
                arena.rendezvous.barrier("counted")
                seen.append((arena.num_bytes, descriptors, maps, keys, resident))
    return seen


@pytest.mark.full
def test_500_dropped_ops_leave_memory_descriptors_and_keys_flat(ranks):
    for seen in ranks(drop_many_ops, 2, Case(world_size=2, tokens=((4, 3),), hidden_dim=32)):
        num_bytes, descriptors, maps, keys, resident = zip(*seen[1:], strict=True)
        assert [len(set(each)) for each in (num_bytes, descriptors, maps)] == [1, 1, 1], seen
        # a rank that is ahead has not deleted its last messages
        assert max(keys) - min(keys) <= 2, seen
        assert resident[-1] - resident[0] < 4 << 20, seen


@pytest.mark.parametrize(
    ("number", "remedy", "said"),
    [
        (errno.EMFILE, "as given", "ulimit -n"),
        (errno.ENFILE, None, "ulimit -n"),
        (errno.ENOSPC, None, "--shm-size"),
        (errno.ENOSPC, "as given", "as given"),
    ],
)
def test_too_many_open_files_are_told_as_such(number, remedy, said):
    with (
        pytest.raises(errors.HostMemoryError, match="expected to have it") as caught,
        refusals_named("to have it", remedy),
    ):
        raise OSError(number, os.strerror(number))
    assert said in caught.value.remedy
    assert os.strerror(number) in caught.value.got


# --- MORI's shmem functions ---


def life_of_a_world(context: RankContext) -> None:
    def init(name: str = "a world") -> int:
        return shmem.shmem_torch_process_group_init(name, context.device)

    torch._C._distributed_c10d._register_process_group("a world", context.group)
    raised(errors.NotInitializedError, shmem.default_arena, "shmem_torch_process_group_init")
    error = raised(errors.UnknownNameError, lambda: init("no such group"), "'no such group'", "group.group_name")
    assert "torch._C" not in str(error)
    assert init() == 0
    raised(errors.StateError, init, "shmem_finalize")
    arena = shmem.default_arena()
    assert (shmem.shmem_mype(), shmem.shmem_npes(), arena.device) == (context.rank, 3, context.device)
    tensor, other = shmem.shmem_malloc(4096), shmem.shmem_malloc(64)
    assert (tensor.dtype, tensor.shape, bool(tensor.any())) == (torch.uint8, (4096,), False)
    shmem.shmem_barrier_all()
    for peer in range(context.world_size):
        memory_at(shmem.shmem_ptr_p2p(tensor, peer), 4096)[context.rank] = 1 + context.rank
    shmem.shmem_barrier_all()
    assert tensor[:3].tolist() == [1, 2, 3]
    assert shmem.shmem_ptr_p2p(other, context.rank) == other.data_ptr()
    for call in (
        lambda: shmem.shmem_ptr_p2p(tensor, -1),
        lambda: shmem.shmem_ptr_p2p(tensor, context.world_size),
        lambda: shmem.shmem_ptr_p2p(torch.zeros(16), 0),
        lambda: shmem.shmem_free(torch.zeros(16)),
    ):
        raised(errors.EpA2AError, call)
    shmem.shmem_free(tensor)
    shmem.shmem_barrier_all()
    assert (shmem.shmem_finalize(), shmem.shmem_finalize()) == (0, 0)
    assert arena.closed
    for call in (shmem.shmem_mype, shmem.shmem_npes, shmem.shmem_barrier_all):
        raised(errors.NotInitializedError, call)
    assert init() == 0
    shmem.shmem_malloc(16)
    shmem.shmem_finalize()
    torch._C._distributed_c10d._unregister_process_group("a world")


def test_the_shmem_functions_of_mori(ranks):
    ranks(life_of_a_world, 3)
