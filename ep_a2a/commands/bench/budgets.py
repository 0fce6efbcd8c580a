"""Checks the multiprocessors that ranks may take, where ranks share a GPU, before any rank starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.errors import ConfigError
from ep_a2a.ops.gpu_share import share_of
from ep_a2a.topology.gpu_share import ranks_per_gpu
from ep_a2a.tuning.policy import LEAST_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence

OPS_AT_ONCE = 1
"""Ops of different index in one row: a contender's ops have ended when the next contender starts."""
DEFAULT_SHARED_RANKS = 2
"""Ranks of --shared-gpu without --ranks."""


def require_shareable(device: str, *, joined: bool) -> None:
    """Checks that --shared-gpu can be had.

    Args:
        device: "cpu" or "cuda". joined: whether torchrun has started the ranks.

    Raises:
        ConfigError: there is no GPU, or ranks have GPUs already.
    """
    if device != "cuda":
        raise ConfigError("GPUs with --shared-gpu", f"ranks on {device}", "Leave --shared-gpu out.")
    if joined:
        remedy = "Start bench without torchrun, or leave --shared-gpu out and set CUDA_VISIBLE_DEVICES to one GPU."
        raise ConfigError("no torchrun with --shared-gpu, which starts ranks itself", "ranks of torchrun", remedy)


def check_budgets(budgets: Sequence[int], num_ranks: Sequence[int], num_gpus: int, num_sms: int) -> None:
    """Checks that every number of ranks fits on the GPUs with every budget, where ranks share GPUs.

    Args:
        budgets: of --max-sms, multiprocessors of each rank; 0 = the rank's share.
        num_ranks: of --ranks. num_gpus: that they use. num_sms: multiprocessors of one GPU.

    Raises:
        ConfigError: a budget is too small for a launch, or too large for all ranks of a GPU together.
        UnsupportedError: no budget would do.
    """
    for sharing in sorted({ranks_per_gpu(each, num_gpus) for each in num_ranks} - {0, 1}, reverse=True):
        most = share_of(num_sms, sharing, OPS_AT_ONCE)
        wrong = [budget for budget in budgets if budget and not LEAST_PROGRAMS <= budget <= most]
        if wrong:
            raise ConfigError(
                f"--max-sms from {LEAST_PROGRAMS} to {most}: {sharing} ranks share a GPU of {num_sms} multiprocessors",
                ", ".join(map(str, wrong)),
                f"Lower --max-sms to {most}, or start fewer --ranks; 0 takes the share.",
            )


def require_several(num_ranks: Sequence[int]) -> None:
    """Raises ConfigError where --shared-gpu has a rank that would share with nobody."""
    if min(num_ranks) < 2:
        raise ConfigError("--ranks of 2 or more with --shared-gpu", str(min(num_ranks)), "Raise --ranks.")
