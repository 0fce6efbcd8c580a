"""`mori.ops.local_expert_count`."""

from __future__ import annotations

from typing import Any

from ep_a2a.compat.mori.unsupported import refused


def launch_local_expert_count(
    config: Any,
    indices_ptr: int,
    total_recv_token_num_ptr: int,
    local_expert_count_ptr: int,
    block_num: int = -1,
    warp_per_block: int = -1,
    stream: int = 0,
) -> None:
    """MORI's kernel on raw pointers: not here.

    Raises:
        UnsupportedError: always.
    """
    raise refused(
        "launch_local_expert_count, which counts at an address",
        "Pass call_local_expert_count=True to dispatch and read op.local_expert_count.",
    )
