"""`mori.ops.local_expert_count`: rows per local expert."""

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
    """MORI's kernel on raw pointers. Not supported.

    Raises:
        UnsupportedError: always.
    """
    raise refused("ops.launch_local_expert_count")
