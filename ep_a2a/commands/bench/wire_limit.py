"""Measures the wire's limit: contiguous pushes of the deduplicated bytes between ranks, with one flag each.

Dispatch and combine are one launch each: on a GPU of CUDA C (`wire_cuda`), with the grid that has the fastest round
trip; on CPU of an interpreted kernel (`wire_kernels`).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ep_a2a.commands.bench.contender import Contender, Session
from ep_a2a.commands.bench.timing import TimingSettings, make_clock, summarize, time_round_trips
from ep_a2a.commands.bench.wire_plan import VECTOR_BYTES, Peer, pattern, transfers
from ep_a2a.errors import CheckFailedError, RankTimeoutError
from ep_a2a.memory.arena import allocate_symmetric
from ep_a2a.memory.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ep_a2a.commands.bench.contender import BenchContext
    from ep_a2a.commands.bench.workload import Workload
    from ep_a2a.memory.symmetric import SymmetricMemory

GPU_LAUNCHES = ((28, 256), (56, 256), (84, 256), (126, 256), (126, 512), (132, 1024))
"""(blocks, threads) to try."""
CPU_LAUNCH = (1, 64)
TUNING = TimingSettings(num_warmups=3, num_runs=15)
CPU_MAX_POLLS = 100_000
"""Polls before giving up, about 30 s."""
GAVE_UP = 2
"""Index of the word in a direction's state that is set where a flag did not come."""
FLAG_BYTES = 4
ALIGNMENT_BYTES = 256


class WireLimitContender(Contender):
    """No row finds its place and nothing is cast: only the time that the bytes and one hop of flags need.

    It is not bound by max_sms, and layout and max_num_tokens do not matter to it.
    """

    name: ClassVar[str] = "wire_limit"

    def unavailable(self, workload: Workload, device: torch.device) -> str | None:
        """One rank has no wire."""
        return "one rank has no peers" if workload.world_size == 1 else None

    def prepare(self, workload: Workload, context: BenchContext) -> Session:
        """Allocates the landing areas and, on a GPU, finds the best grid. Collective."""
        session = WireLimitSession(workload, context)
        if context.device.type == "cuda":
            session.choose_launch()
        return session


@dataclass
class Direction:
    """Dispatch or combine.

    Attributes:
        landing: uint8, where the others' bytes arrive here.
        state: int32 words of the kernel: epoch, programs that have arrived, whether a flag did not come.
        received: by source rank, (first vector in its source, number of vectors, first vector in `landing`).
        push: queues the launch with (programs, threads).
    """

    landing: torch.Tensor
    state: torch.Tensor
    received: dict[int, tuple[int, int, int]]
    push: Callable[[int, int], None]


class WireLimitSession(Session):
    """Dispatch and combine as pushes of a pattern; combine returns this rank's landing area, uint8."""

    def __init__(self, workload: Workload, context: BenchContext) -> None:
        super().__init__()
        self._context = context
        self._rendezvous = Rendezvous(context.group)
        remote = workload.traffic()
        remote.fill_diagonal_(0)
        matrices = [
            -(-remote * workload.dispatch_row_bytes // VECTOR_BYTES),
            -(-remote.T * workload.combine_row_bytes // VECTOR_BYTES),
        ]
        landing_bytes = [_aligned(int(matrix.sum(0).max()) * VECTOR_BYTES) for matrix in matrices]
        # Landing areas of dispatch and combine, then the flags of each.
        sizes = [*landing_bytes, *[_aligned(context.world_size * FLAG_BYTES)] * 2]
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._memory = allocate_symmetric(self._rendezvous, context.device, sum(sizes))
        self._dispatch, self._combine = (
            make_direction(matrices[way], self._memory, starts[way], sizes[way], starts[2 + way], context)
            for way in range(2)
        )
        self._use_launch(CPU_LAUNCH)
        self._meet("flags are clear")

    def choose_launch(self) -> None:
        """Takes the launch numbers with the fastest round trip, the same on all ranks."""
        clock = make_clock(self._context)
        best_us = float("inf")
        for launch in GPU_LAUNCHES:
            self._use_launch(launch)
            times_us = time_round_trips(self, clock, TUNING, in_graph=True)
            round_trip_us = summarize(self._rendezvous.exchange("limit's launch", times_us)).p50_us
            if round_trip_us < best_us:
                best_us, best = round_trip_us, launch
        self._use_launch(best)

    def dispatch(self) -> None:
        """Pushes the bytes of a dispatch."""
        self._dispatch.push(*self._launch)

    def combine(self, dispatched: None) -> torch.Tensor:
        """Pushes the bytes of a combine."""
        self._combine.push(*self._launch)
        return self._combine.landing

    def check(self) -> None:
        """Every byte of every rank has arrived when the flags have."""
        for direction in (self._dispatch, self._combine):
            direction.landing.zero_()
        self._meet("landing areas are clear")
        self.dispatch()
        self.combine(None)
        self._meet("both pushes are over")
        self.check_timed()
        for direction in (self._dispatch, self._combine):
            for source, (first, count, landed) in direction.received.items():
                words = slice(landed * VECTOR_BYTES, (landed + count) * VECTOR_BYTES)
                got = direction.landing[words].view(torch.int32)
                want = pattern(source, first, count, got.device)
                if not torch.equal(got, want):
                    num_wrong = int((got != want).sum())
                    raise CheckFailedError(f"rank {source}'s {got.numel()} words", f"{num_wrong} others")

    def check_timed(self) -> None:
        """Every flag has come."""
        for direction in (self._dispatch, self._combine):
            if int(direction.state[GAVE_UP]):
                raise RankTimeoutError("every rank's flag", "a flag that did not come")

    def close(self) -> None:
        """Gives the landing areas back when all ranks are done with them."""
        self._meet("the limit is measured")
        # Views of symmetric memory must be gone before it is.
        del self._dispatch, self._combine
        self._memory.close()

    def _meet(self, label: str) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        self._rendezvous.barrier(label)

    def _use_launch(self, launch: tuple[int, int]) -> None:
        num_peers = self._context.world_size - 1
        # As many programs for each peer.
        num_programs = max(1, launch[0] // num_peers) * num_peers
        self._launch = num_programs, launch[1]
        self.details = {"num_programs": num_programs, "num_threads": launch[1]}


def make_direction(
    vectors: torch.Tensor, memory: SymmetricMemory, start: int, num_bytes: int, flags: int, context: BenchContext
) -> Direction:
    """One direction of `vectors` [source, destination], landing at byte `start` and with flags at byte `flags`."""
    rank, world_size, device = context.rank, context.world_size, context.device
    plans = {source: transfers(vectors, source) for source in range(world_size)}
    addresses = memory.peer_addresses
    peers = []
    for step, (first, count, landed) in enumerate(plans[rank]):
        peer = (rank + 1 + step) % world_size
        target = addresses[peer] + start + landed * VECTOR_BYTES
        flag_there = addresses[peer] + flags + rank * FLAG_BYTES
        peers.append(Peer(first, count, target, flag_there, addresses[rank] + flags + peer * FLAG_BYTES))
    source = pattern(rank, 0, int(vectors[rank].sum()), device)
    state = torch.zeros(3, dtype=torch.int32, device=device)
    make_push = _cuda_push if device.type == "cuda" else _interpreted_push
    return Direction(
        landing=memory.local[start : start + num_bytes],
        state=state,
        received={source: plan[(rank - source - 1) % world_size] for source, plan in plans.items() if source != rank},
        push=make_push(source, state, peers),
    )


def _cuda_push(source: torch.Tensor, state: torch.Tensor, peers: Sequence[Peer]) -> Callable[[int, int], None]:
    from ep_a2a.commands.bench.wire_cuda import compile_push

    kernel = compile_push(peers)

    def push(num_programs: int, num_threads: int) -> None:
        kernel((num_programs, 1, 1), (num_threads, 1, 1), [source, state])

    return push


def _interpreted_push(source: torch.Tensor, state: torch.Tensor, peers: Sequence[Peer]) -> Callable[[int, int], None]:
    from ep_a2a.commands.bench.wire_kernels import push_kernel

    plan = torch.tensor([astuple(peer) for peer in peers], dtype=torch.int64)
    lanes = 1 << (len(peers) - 1).bit_length()

    def push(num_programs: int, num_threads: int) -> None:
        push_kernel.interpret((num_programs,), source, plan, state, CPU_MAX_POLLS, len(peers), lanes, num_threads)

    return push


def _aligned(num_bytes: int) -> int:
    return max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
