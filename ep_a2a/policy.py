"""Launch numbers: a pure function of the device, the shapes and the caller's wishes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig

INTERPRETED_PROGRAMS = 3
"""Programs per launch on CPU: more than one, so that what programs share is exercised; few, since they run in turn."""
DISPATCH_WARPS = 8
COMBINE_WARPS = 4
COMBINE_BLOCK_ELEMENTS = 1024
COMBINE_PROGRAMS_PER_SM = 4
"""Programs of COMBINE_WARPS warps that fit on one multiprocessor together; all of them wait, so all must fit."""

MAX_PROGRAMS = (1 << 15) - 1
"""Programs that the arrival word of kernels/primitives.py can count."""


class Phase(enum.Enum):
    """The launches of an op."""

    DISPATCH = "dispatch"
    STAGE = "stage"
    COMBINE = "combine"


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched.

    Attributes:
        num_programs: programs (thread blocks) of the grid.
        num_warps: warps of 32 threads per program.
        reason: where the numbers come from.
    """

    num_programs: int
    num_warps: int
    reason: str


def choose_launch(
    config: EpDispatchCombineConfig,
    phase: Phase,
    num_tokens: int,
    num_sms: int,
    block_num: int = -1,
    warp_per_block: int = -1,
) -> Launch:
    """Launch numbers of one call.

    Args:
        config: the op's; its numbers are used with launch="manual", its max_sms bounds the grid.
        phase: which kernel.
        num_tokens: tokens that this rank brings (dispatch, combine) or may have received (stage).
        num_sms: multiprocessors of the device; 0 on CPU.
        block_num, warp_per_block: the caller's numbers, used when > 0.
    """
    if num_sms == 0:
        return Launch(block_num if 0 < block_num <= 4 else INTERPRETED_PROGRAMS, 1, "interpreter")
    sms = min(num_sms, config.max_sms) if config.max_sms else num_sms
    if phase is Phase.DISPATCH:
        wanted, warps, most = num_tokens, DISPATCH_WARPS, sms
    else:
        blocks_per_token = -(-config.hidden_dim // COMBINE_BLOCK_ELEMENTS)
        wanted, warps, most = num_tokens * blocks_per_token, COMBINE_WARPS, sms * COMBINE_PROGRAMS_PER_SM
    reason = "analytic"
    if config.launch == "manual":
        wanted, warps, reason = config.block_num, config.warp_num_per_block, "config"
    if block_num > 0:
        wanted, reason = block_num, "caller"
    if warp_per_block > 0:
        warps, reason = warp_per_block, "caller"
    # Every program may wait for other ranks, so the grid must fit on the device at once.
    most = min(most, sms * max(1, 16 // warps)) if warps > COMBINE_WARPS else most
    most = min(most, MAX_PROGRAMS)
    return Launch(max(1, min(wanted, most)), 1 << (max(1, min(warps, 16)).bit_length() - 1), reason)
