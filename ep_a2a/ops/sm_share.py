"""Divides a GPU's multiprocessors among the ranks and ops that use it, so that all waiting programs fit on it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ep_a2a.errors import UnsupportedError
from ep_a2a.memory.gpus import refuse_masks_under_mps
from ep_a2a.policy import LEAST_PROGRAMS

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.ops.op import EpDispatchCombineOp

logger = logging.getLogger(__name__)


def share_of(num_sms: int, num_ranks: int, num_ops: int) -> int:
    """Multiprocessors for one launch, where each of num_ranks ranks may have num_ops launches that wait at once.

    Raises:
        UnsupportedError: a launch needs more.
    """
    share = num_sms // num_ranks // num_ops
    if share < LEAST_PROGRAMS:
        raise UnsupportedError(
            f"{LEAST_PROGRAMS} multiprocessors at least for each op that may wait for other ranks",
            f"{share}: {num_ranks} ranks with {num_ops} ops of different index share a GPU of {num_sms}",
            "Start fewer ranks per GPU, or close ops, or give ops whose steps do not overlap one index.",
        )
    return share


def agree_on_share(config: EpDispatchCombineConfig, arena: Arena, index: int) -> int:
    """Multiprocessors that a launch of any op of the arena may use; 0 = all. Collective.

    All ranks get the same number. Ops of one index follow each other, so they count as one.

    Args:
        config: of the op that is being built.
        arena, index: where it is built.

    Raises:
        UnsupportedError: the launches would not fit on the GPU together, or ranks may be masked under MPS; raised on
            all ranks.
    """
    if arena.ranks_per_gpu < 2:
        return 0
    num_ops = len({place[1] for place in arena.users} | {index})
    num_sms = torch.cuda.get_device_properties(arena.device).multi_processor_count
    everyone = arena.rendezvous.exchange("share of a GPU", [num_sms, num_ops])
    try:
        if config.masks:
            refuse_masks_under_mps()
        share = share_of(min(s for s, _ in everyone), arena.ranks_per_gpu, max(n for _, n in everyone))
    except UnsupportedError:
        arena.give_back(index)
        raise
    logger.info(
        "rank %d: %d ranks share a GPU, at most %d multiprocessors for each launch",
        config.rank,
        arena.ranks_per_gpu,
        share,
    )
    return share


def share_gpu(share: int, new: EpDispatchCombineOp, arena: Arena) -> None:
    """Bound the launches of a new op and of the ops that may now wait beside it; 0 bounds nothing. Local.

    Graphs that were captured before keep their launches.
    """
    if share == 0:
        return
    for op in (new, *(op for op in arena.users.values() if op is not new)):
        op.engine.limit_sms(share, "share of the GPU")
