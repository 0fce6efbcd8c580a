"""Times the reference push: contiguous pushes of the deduplicated bytes between ranks, with one flag each.

Dispatch and combine are one launch each, which places no rows and casts nothing. On a GPU the session takes the launch
with the fastest round trip. With a bound of N multiprocessors it has N programs, and also the number of vectors in
flight is tried: that is what N multiprocessors can put on the wire. Where ranks share a GPU, rows that stay on a rank
are pushed, too: they take the same memory and multiprocessors there.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ep_a2a.commands.measure.push import VECTOR_BYTES, Push, PushLaunch
from ep_a2a.commands.measure.session import RoundTrip
from ep_a2a.commands.measure.timing import Timer, TimingSettings
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.ops.sm_share import share_of
from ep_a2a.testing.worker import RankContext

GRIDS = ((28, 256), (56, 256), (84, 256), (126, 256), (126, 512), (132, 1024))
"""(programs, threads) to try without a bound."""
BOUNDED_THREADS = (256, 512, 1024)
BOUNDED_LOADS = (1, 2, 4, 8)
"""Threads, and vectors in flight of each, to try where the bound says how many programs there are."""
CPU_LAUNCH = PushLaunch(1, 64)
TUNING = TimingSettings(num_warmups=3, num_runs=15)


class ReferencePush(RoundTrip):
    """Dispatch and combine as pushes of a pattern; combine returns this rank's landing area, uint8.

    layout and max_tokens have no effect on it.
    """

    def __init__(self, workload: Workload, context: RankContext) -> None:
        super().__init__()
        self._context, self._is_layer = context, workload.intermediate > 0
        self._exchange_us: float | None = None
        self._rendezvous = Rendezvous(context.group)
        shares = context.ranks_per_gpu > 1
        budget = self._budget(workload.max_sms)
        rows = workload.traffic()
        if shares:
            self.details["counts_local_rows"] = True
        else:
            rows.fill_diagonal_(0)
        self._dispatch, self._combine = (
            Push(context, self._rendezvous, -(-each * row_bytes // VECTOR_BYTES), counts_own=shares)
            for each, row_bytes in ((rows, workload.dispatch_row_bytes), (rows.T, workload.combine_row_bytes))
        )
        self._launch = CPU_LAUNCH
        if context.device.type == "cuda":
            self._choose(launches_to_try(context.world_size - 1 + shares, budget))
        self.details |= {"num_programs": self._launch.num_programs, "num_threads": self._launch.num_threads}
        if budget:
            self.details["vectors_in_flight"] = self._launch.num_loads

    def dispatch(self) -> None:
        """Pushes the bytes of a dispatch."""
        self._dispatch.push(self._launch)

    def combine(self, dispatched: None) -> torch.Tensor:
        """Pushes the bytes of a combine."""
        self._combine.push(self._launch)
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
            direction.check_bytes()

    def check_timed(self) -> None:
        """Checks that every flag has come."""
        for direction in (self._dispatch, self._combine):
            direction.check_flags()

    def close(self) -> None:
        """Gives the landing areas back when all ranks are done with them."""
        self._meet("the pushes are measured")
        self._dispatch.close()
        self._combine.close()

    def measure(self, timer: Timer) -> dict[str, Any]:
        """Returns the times of a round trip; of a layer's bytes `exchange_us`, which is timed once."""
        if not self._is_layer:
            return super().measure(timer)
        self._exchange_us = self._exchange_us or timer.median_us(self.round_trip)
        return {"exchange_us": self._exchange_us}

    def _budget(self, max_sms: int) -> int:
        """Returns the multiprocessors that a push may take, on a shared GPU the rank's share at most; 0 = all."""
        context = self._context
        if context.device.type != "cuda" or context.ranks_per_gpu == 1:
            return max_sms
        num_sms = torch.cuda.get_device_properties(context.device).multi_processor_count
        share = share_of(num_sms, context.ranks_per_gpu, num_ops=1)
        return min(max_sms or share, share)

    def _choose(self, launches: Sequence[PushLaunch]) -> None:
        """Takes the fastest launch. Medians, and so the choice, are the same on all ranks."""
        timer, timed = Timer(self._context, TUNING), []
        for launch in launches:
            self._launch = launch
            timed.append((timer.median_us(self.round_trip), launch))
        self._launch = min(timed)[1]

    def _meet(self, label: str) -> None:
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        self._rendezvous.barrier(label)


def launches_to_try(num_peers: int, budget: int) -> list[PushLaunch]:
    """Returns the launches to try on a GPU.

    Args:
        num_peers: ranks that a push goes to.
        budget: programs of a launch, each of which serves every peer; 0 = GRIDS, in which every peer has as many.
    """
    if budget:
        return [PushLaunch(budget, each, loads, True) for loads in BOUNDED_LOADS for each in BOUNDED_THREADS]
    return [PushLaunch(max(1, programs // num_peers) * num_peers, threads) for programs, threads in GRIDS]
