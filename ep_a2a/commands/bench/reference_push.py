"""Times the reference push: contiguous pushes of the deduplicated bytes between ranks, with one flag each.

Dispatch and combine are one launch each, which places no rows and casts nothing. On a GPU the session takes the grid
with the fastest round trip. Where ranks share a GPU, the grid keeps to the budget of the rank, and rows that stay on a
rank are pushed, too: they take the same memory and multiprocessors there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.commands.bench.contenders import OPS_AT_ONCE, REFERENCE_PUSH, Contender
from ep_a2a.commands.measure.push import GAVE_UP, VECTOR_BYTES, Push, pattern
from ep_a2a.commands.measure.session import RoundTrip
from ep_a2a.commands.measure.timing import Timer, TimingSettings
from ep_a2a.errors import CheckFailedError, RankTimeoutError, UnsupportedError
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.ops.sm_share import share_of

if TYPE_CHECKING:
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

GPU_LAUNCHES = ((28, 256), (56, 256), (84, 256), (126, 256), (126, 512), (132, 1024))
"""(blocks, threads) to try."""
SHARED_GPU_THREADS = (256, 512, 1024)
"""Threads to try where ranks share a GPU: there the budget says how many blocks run."""
CPU_LAUNCH = (1, 64)
TUNING = TimingSettings(num_warmups=3, num_runs=15)


class ReferencePush(RoundTrip):
    """Dispatch and combine as pushes of a pattern; combine returns this rank's landing area, uint8.

    layout and max_num_tokens have no effect on it; max_sms bounds it where ranks share a GPU.
    """

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__()
        self._context = context
        self._rendezvous = Rendezvous(context.group)
        shares = context.ranks_per_gpu > 1
        self._num_peers = context.world_size - 1 + shares
        launches = self._bounded_launches(workload.max_sms) if shares else GPU_LAUNCHES
        rows = workload.traffic()
        if not shares:
            rows.fill_diagonal_(0)
        self._dispatch, self._combine = (
            Push(context, self._rendezvous, -(-each * row_bytes // VECTOR_BYTES), counts_own=shares)
            for each, row_bytes in ((rows, workload.dispatch_row_bytes), (rows.T, workload.combine_row_bytes))
        )
        self._use_launch((launches[0][0], CPU_LAUNCH[1]) if shares else CPU_LAUNCH)
        if context.device.type == "cuda":
            timer = Timer(context, TUNING)
            # Medians are the same on all ranks.
            times_us = {launch: self._time(launch, timer) for launch in launches}
            self._use_launch(min(times_us, key=lambda launch: times_us[launch]))

    def dispatch(self) -> None:
        """Pushes the bytes of a dispatch."""
        self._dispatch.push(*self._launch)

    def combine(self, dispatched: None) -> torch.Tensor:
        """Pushes the bytes of a combine."""
        self._combine.push(*self._launch)
        return self._combine.landing

    def check(self) -> None:
        """Checks that every byte of every rank has arrived when the flags have."""
        for direction in (self._dispatch, self._combine):
            direction.landing.zero_()
        self._meet("landing areas are clear")
        self.round_trip()
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
        """Checks that every flag has come."""
        for direction in (self._dispatch, self._combine):
            if int(direction.state[GAVE_UP]):
                raise RankTimeoutError("every rank's flag", "a flag that did not come")

    def close(self) -> None:
        """Gives the landing areas back when all ranks are done with them."""
        self._meet("the pushes are measured")
        self._dispatch.close()
        self._combine.close()

    def _bounded_launches(self, max_sms: int) -> tuple[tuple[int, int], ...]:
        """Returns the launches to try on a GPU that ranks share, each within the budget; notes both in the details.

        Raises:
            UnsupportedError: the budget has no program for each rank.
        """
        context, budget = self._context, max_sms
        if context.device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(context.device).multi_processor_count
            share = share_of(num_sms, context.ranks_per_gpu, OPS_AT_ONCE)
            budget = min(max_sms or share, share)
        budget = budget or self._num_peers
        if budget < self._num_peers:
            raise UnsupportedError(
                f"a budget of {self._num_peers} multiprocessors, one for each rank that a push goes to",
                str(budget),
                "Raise --max-sms, or start fewer --ranks.",
            )
        self.details |= {"max_sms": budget, "counts_local_rows": True}
        return tuple((budget, num_threads) for num_threads in SHARED_GPU_THREADS)

    def _time(self, launch: tuple[int, int], timer: Timer) -> float:
        self._use_launch(launch)
        return timer.median_us(self.round_trip)

    def _use_launch(self, launch: tuple[int, int]) -> None:
        # Every peer has as many programs.
        num_programs = max(1, launch[0] // self._num_peers) * self._num_peers
        self._launch = num_programs, launch[1]
        self.details |= {"num_programs": num_programs, "num_threads": launch[1]}

    def _meet(self, label: str) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        self._rendezvous.barrier(label)


def unavailable(workload: Workload, device: torch.device) -> str | None:
    """Returns that a rank alone has no peers; None with several ranks."""
    return "one rank has no peers" if workload.world_size == 1 else None


CONTENDERS = (Contender(REFERENCE_PUSH, ReferencePush, unavailable=unavailable),)
