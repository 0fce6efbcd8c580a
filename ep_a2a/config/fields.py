"""The integer fields of the configuration: their least values, and the check that they are integers at all."""

from __future__ import annotations

import operator
from typing import Any

from ep_a2a import env
from ep_a2a.errors import ConfigError

MINIMUM = {
    "rank": 0,
    "world_size": 1,
    "hidden_dim": 1,
    "scale_dim": 0,
    "scale_type_size": 0,
    "max_token_type_size": 1,
    "max_num_inp_token_per_rank": 1,
    "num_experts_per_rank": 0,
    "num_experts_per_token": 1,
    "warp_num_per_block": 1,
    "block_num": 1,
    "max_total_recv_tokens": 0,
    "gpu_per_node": 1,
    "rdma_block_num": 0,
    "num_qp_per_pe": 1,
    "num_experts": 0,
    "flagged_max_tokens": 0,
    "expert_alignment": 1,
    "chunk_tokens": 1,
    "ring_chunks": 1,
    "num_owner_ranks": 0,
    "first_rank": 0,
    "max_sms": 0,
}
"""By name of a field of EpDispatchCombineConfig."""


def checked_integer(name: str, value: Any, minimum: int) -> int:
    """A plain int of any integer type (numpy's, say), at least `minimum`.

    Raises:
        ConfigError: it is something else.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < minimum:
        raise ConfigError(f"{name} to be an integer >= {minimum}", repr(value))
    return number


def checked_timeout_secs(value: Any, name: str = "timeout_secs") -> float:
    """A bound of waits, in seconds.

    Raises:
        ConfigError: it is not a number above 0, or too large for the kernels' clock.
    """
    if isinstance(value, int | float) and 0 < value <= env.MAX_TIMEOUT_SECS:
        return float(value)
    raise ConfigError(f"{name} to be a number of seconds above 0, at most {env.MAX_TIMEOUT_SECS:g}", repr(value))
