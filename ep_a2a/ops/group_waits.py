"""Waits for collectives of a process group, whose error tells who is gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.device_groups import wait_for
from ep_a2a.memory.liveness import GivenUp
from ep_a2a.ops.agreement import Agreement, with_verdict

if TYPE_CHECKING:
    import torch

    from ep_a2a.memory.device_groups import DeviceGroups


def wait_for_all(work: dist.Work, device: torch.device, groups: DeviceGroups, timeout_secs: float) -> None:
    """Waits for a collective of all ranks: on CPU until it is done, on CUDA by making the current stream wait.

    Args:
        work: what the collective returned.
        device: where its tensors lie.
        groups: the ranks.
        timeout_secs: bound on CPU; on CUDA the process group's own timeout holds.

    Raises:
        RankTimeoutError: on CPU, when timeout_secs have passed or the connection to a rank is lost; at most
            PATIENCE_SECS later (ops/agreement.py). A collective does not tell who did not come, so missing_ranks are
            those whose process has ended or is stopped, late_ranks those that live and do not give up, too.
    """
    rank, world_size = dist.get_rank(groups.cpu_group), dist.get_world_size(groups.cpu_group)
    start = time.monotonic()
    try:
        wait_for(work, device, timeout_secs, rank)
    except RankTimeoutError as error:
        if groups.liveness is None:
            raise
        agreement = Agreement(groups.liveness, rank, world_size)
        agreement.begin_anew(none_waits=False)
        lacked = tuple(other for other in range(world_size) if other != rank)
        left_secs = max(0.0, timeout_secs - (time.monotonic() - start))
        verdict = agreement.verdict(GivenUp(lacked, began=True), timeout_secs, left_secs)
        raise with_verdict(error, verdict) from error
