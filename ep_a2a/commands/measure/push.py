"""Pushes contiguous bytes between ranks, with one flag per peer: bench's reference push, the doctor's self-test.

On a GPU, NVRTC compiles `push.cu`, which shares neither source nor compiler with the kernels that are compared with it.
Sizes and addresses are constants of that source: loading them would take time that the transfer does not need. On CPU,
the process copies the bytes itself: its times mean nothing, but the plan of the bytes and the check run everywhere.
"""

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ep_a2a.errors import CheckFailedError, RankTimeoutError, UnsupportedError
from ep_a2a.memory.arena import allocate_symmetric
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing.worker import RankContext

VECTOR_BYTES = 16
FLAG_BYTES = 4
ALIGNMENT_BYTES = 256
"""Of the flags behind a landing area."""
PATTERN_FACTOR, PATTERN_STEP = 2_654_435_761 - (1 << 32), 97_003
EPOCH, GAVE_UP = 0, 2
"""Words of a push's state: the number of its launches, and whether a flag has not come in time."""
CPU_TIMEOUT_SECS = 30.0
"""Seconds that a push on CPU waits for a flag."""
LOADS_IN_FLIGHT = 8
"""Vectors that a thread loads before it stores the first, where a launch does not say."""
MAX_THREADS = 1024
LINKS_REMEDY = "Look at the links and at the GPUs' errors: nvidia-smi -q -d ECC; dmesg | grep -i xid"
CUDA_SOURCE = Path(__file__).with_name("push.cu")
CUDA_CONSTANTS = {
    "MAX_THREADS": MAX_THREADS,
    # Reading the clock is slow: at every poll it would delay the next look at the flag.
    "POLLS_PER_CLOCK_READING": 4096,
    "TIMEOUT_NS": "10000000000ULL",
}


class PushLaunch(NamedTuple):
    """Launch numbers of a push.

    Attributes:
        num_programs: programs of the grid. num_threads: of a program.
        num_loads: vectors that a thread loads before it stores the first.
        spreads: whether each program copies its share for every peer. Else it serves one peer, and num_programs is a
            multiple of the number of peers.
    """

    num_programs: int
    num_threads: int
    num_loads: int = LOADS_IN_FLIGHT
    spreads: bool = False


@dataclass(frozen=True)
class Peer:
    """Part of one launch for one other rank.

    Attributes:
        first_vector, num_vectors: the part of this rank's source that goes to the peer, in vectors of 16 bytes.
        target: address that it is written to.
        flag_there: address of this rank's flag at the peer. flag_here: of the peer's flag at this rank.
    """

    first_vector: int
    num_vectors: int
    target: int
    flag_there: int
    flag_here: int


class Push:
    """Pushes of one direction, such as dispatch, between all ranks; `pattern` says what each rank sends. Collective.

    Args:
        context: this rank.
        rendezvous: of all ranks.
        vectors: numbers of vectors that each source sends to each destination, int64 [W, W], equal on all ranks.
        counts_own: whether a rank is a peer of its own, and pushes the vectors of the diagonal, too.

    Attributes:
        landing: uint8, where the peers' bytes arrive.
        state: int32 [3], of the kernel: epoch, programs that have arrived, whether a flag did not come in time.
        received: by source rank, (first vector in its source, number of vectors, first vector in `landing`).
        push: queues a PushLaunch. The first launch with other num_loads or spreads compiles for about a second.
    """

    def __init__(
        self, context: RankContext, rendezvous: Rendezvous, vectors: torch.Tensor, *, counts_own: bool = False
    ) -> None:
        rank, world_size, device = context.rank, context.world_size, context.device
        flags = max(1, -(-int(vectors.sum(0).max()) * VECTOR_BYTES // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        self._memory = memory = allocate_symmetric(rendezvous, device, flags + world_size * FLAG_BYTES)
        plans = {source: transfers(vectors, source, counts_own=counts_own) for source in range(world_size)}
        addresses = memory.peer_addresses
        peers = []
        for peer, (first, count, landed) in plans[rank].items():
            target = addresses[peer] + landed * VECTOR_BYTES
            flag_there = addresses[peer] + flags + rank * FLAG_BYTES
            peers.append(Peer(first, count, target, flag_there, addresses[rank] + flags + peer * FLAG_BYTES))
        self.landing = memory.local[:flags]
        self.state = torch.zeros(3, dtype=torch.int32, device=device)
        self.received = {source: plan[rank] for source, plan in plans.items() if rank in plan}
        source = pattern(rank, 0, int(vectors[rank].sum()), device)
        self.push = (_cuda_push if device.type == "cuda" else _copied_push)(source, self.state, peers)
        rendezvous.barrier("flags are clear")

    def check_flags(self) -> None:
        """Raises RankTimeoutError where a flag has not come in time; waits for the pushes that are queued."""
        if int(self.state[GAVE_UP]):
            raise RankTimeoutError("every rank's flag", "a flag that did not come")

    def check_bytes(self) -> None:
        """Raises CheckFailedError where something has arrived that the peers have not sent."""
        for source, (first, count, landed) in self.received.items():
            # No name for a view of the landing area: it would outlive the memory.
            words = slice(landed * VECTOR_BYTES, (landed + count) * VECTOR_BYTES)
            is_wrong = self.landing[words].view(torch.int32) != pattern(source, first, count, self.landing.device)
            if num_wrong := int(is_wrong.sum()):
                raise CheckFailedError(f"rank {source}'s {is_wrong.numel()} words", f"{num_wrong} others", LINKS_REMEDY)

    def close(self) -> None:
        """Gives the landing area back; no rank may push any more."""
        # Views of symmetric memory must be gone before it is.
        del self.landing
        self._memory.close()


def transfers(vectors: torch.Tensor, rank: int, *, counts_own: bool = False) -> dict[int, tuple[int, int, int]]:
    """Returns the pushes of a rank by peer, from rank + 1 on, and last to itself with counts_own.

    Each is (first vector in the rank's source, number of vectors, first vector in the peer's landing area).
    """
    world_size = vectors.shape[0]
    plan, first = {}, 0
    for peer in ((rank + step) % world_size for step in range(1, world_size + counts_own)):
        count = int(vectors[rank, peer])
        plan[peer] = (first, count, int(vectors[:rank, peer].sum()))
        first += count
    return plan


def pattern(rank: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns `count` vectors of a rank's source from vector `first` on: int32 words that differ by rank and place."""
    num_words = VECTOR_BYTES // 4
    words = torch.arange(first * num_words, (first + count) * num_words, dtype=torch.int32, device=device)
    return words.mul_(PATTERN_FACTOR).add_(rank * PATTERN_STEP + 1)


def push_source(peers: Sequence[Peer], num_loads: int = LOADS_IN_FLIGHT, *, spreads: bool = False) -> str:
    """Returns the CUDA C of the kernel that pushes to these peers and waits for their flags.

    Kernel arguments: the source and the state, int32 [3]. Block b serves peer b % len(peers), or with spreads every
    peer, from that one on.
    """
    constants = {"NUM_PEERS": len(peers), "PEERS_PER_BLOCK": len(peers) if spreads else 1, "LOADS": num_loads}
    lines = [f"#define {name} {value}" for name, value in (constants | CUDA_CONSTANTS).items()]
    calls = [
        f"DO({number}, {peer.first_vector}, {peer.num_vectors}, {peer.target:#x}ULL, {peer.flag_there:#x}ULL, "
        f"{peer.flag_here:#x}ULL)"
        for number, peer in enumerate(peers)
    ]
    return "\n".join([*lines, f"#define FOR_EACH_PEER(DO) {' '.join(calls)}", CUDA_SOURCE.read_text("ascii")])


def compile_push(
    peers: Sequence[Peer], num_loads: int = LOADS_IN_FLIGHT, *, spreads: bool = False
) -> Callable[..., None]:
    """Returns the kernel for the current GPU; a call with grid, block and args queues it on the current stream.

    Raises:
        UnsupportedError: this torch cannot compile CUDA C.
    """
    compiler: Any = getattr(torch.cuda, "_compile_kernel", None)
    if compiler is None:
        raise UnsupportedError(
            "torch.cuda._compile_kernel, which torch 2.11 has, for the reference push",
            f"torch {torch.__version__} without it",
            "Use torch 2.11, or leave reference_push out.",
        )
    kernel: Callable[..., None] = compiler(push_source(peers, num_loads, spreads=spreads), "push")
    return kernel


def _cuda_push(source: torch.Tensor, state: torch.Tensor, peers: Sequence[Peer]) -> Callable[[PushLaunch], None]:
    kernel_of = functools.cache(functools.partial(compile_push, peers))

    def push(launch: PushLaunch) -> None:
        kernel = kernel_of(launch.num_loads, spreads=launch.spreads)
        kernel((launch.num_programs, 1, 1), (launch.num_threads, 1, 1), [source, state])

    return push


def _copied_push(source: torch.Tensor, state: torch.Tensor, peers: Sequence[Peer]) -> Callable[[PushLaunch], None]:
    def push(launch: PushLaunch) -> None:
        epoch = int(state[EPOCH]) + 1
        for peer in peers:
            start = source.data_ptr() + peer.first_vector * VECTOR_BYTES
            ctypes.memmove(peer.target, start, peer.num_vectors * VECTOR_BYTES)
            ctypes.c_int32.from_address(peer.flag_there).value = epoch
        deadline = time.monotonic() + CPU_TIMEOUT_SECS
        for peer in peers:
            flag = ctypes.c_int32.from_address(peer.flag_here)
            while flag.value < epoch and not state[GAVE_UP]:
                state[GAVE_UP] = time.monotonic() > deadline
                time.sleep(0)
        state[EPOCH] = epoch

    return push
