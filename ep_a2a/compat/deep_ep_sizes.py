"""DeepEP's buffer size hints, by its published formulas and without DeepEP: how much its buffers take for a shape.

The formulas are those of DeepEP V1 in early 2025 (csrc/config.hpp) and, where they have changed, of July 2026 (dd758ca,
csrc/legacy/config.hpp); constants and chunk sizes are data, configs/deep_ep_sizes.toml. The former are what
`deep_ep_hints` and `ep-a2a plan` reckon with, the latter what `ep_a2a.compat.deep_ep` answers with. Rings are the same
in both, but for the sizes of their chunks.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from typing import Any

from ep_a2a.errors import UnsupportedError
from ep_a2a.tuning.tables import shipped_directory

FILE_NAME = "deep_ep_sizes.toml"
EARLY, CURRENT = "configs", "configs_2026"
"""Tables of configs in the file: of early 2025, and of July 2026."""
INT_BYTES, INT64_BYTES, FLOAT_BYTES, INT4_BYTES, BFLOAT16_BYTES = 4, 8, 4, 16, 2
"""`INT4` is CUDA's vector of four ints."""
SCALE_GROUP = 128
"""Elements that share a scale in DeepEP's fp8 rows."""


@dataclass(frozen=True)
class ChunkConfig:
    """DeepEP's `Config`, of dispatch or of combine: tokens that are sent at once, and tokens that a ring holds."""

    num_sms: int
    nvl_send_tokens: int
    nvl_recv_tokens: int
    rdma_send_tokens: int
    rdma_recv_tokens: int

    @property
    def num_channels(self) -> int:
        """Pairs of multiprocessors, one that sends and one that receives."""
        return self.num_sms // 2


@dataclass(frozen=True)
class DeepEpHints:
    """Bytes that DeepEP asks for on each GPU.

    Attributes:
        nvl_bytes: rings between GPUs of a node; None where its table has no config for this number of ranks.
        rdma_bytes: rings between nodes; None likewise, and 0 inside one node.
        low_latency_bytes: buffers of the low-latency kernels, which are used instead of the rings.
    """

    nvl_bytes: int | None
    rdma_bytes: int | None
    low_latency_bytes: int


@functools.cache
def deep_ep_table() -> dict[str, Any]:
    """The data file, parsed: `constants`, `sizes` and `configs`."""
    return tomllib.loads((shipped_directory() / FILE_NAME).read_text(encoding="utf-8"))


def known_ranks(table: str = EARLY) -> tuple[int, ...]:
    """Numbers of ranks that DeepEP's table has configs for."""
    return tuple(row["num_ranks"] for row in deep_ep_table()[table])


def chunk_configs(num_ranks: int, table: str = EARLY) -> tuple[ChunkConfig, ChunkConfig]:
    """Configs of dispatch and of combine (DeepEP, get_dispatch_config and get_combine_config).

    Args:
        num_ranks: over all nodes.
        table: EARLY or CURRENT.

    Raises:
        UnsupportedError: the table has no row for num_ranks.
    """
    for row in deep_ep_table()[table]:
        if row["num_ranks"] == num_ranks:
            return ChunkConfig(row["num_sms"], *row["dispatch"]), ChunkConfig(row["num_sms"], *row["combine"])
    known = ", ".join(map(str, known_ranks(table)))
    raise UnsupportedError(f"one of DeepEP's numbers of ranks: {known}", str(num_ranks), "Ask for one of these.")


def hidden_bytes_of(hidden_dim: int, element_bytes: int) -> int:
    """Bytes that the hints reckon with for a row: at least those of bf16 (DeepEP, README, get_hidden_bytes)."""
    return hidden_dim * max(element_bytes, BFLOAT16_BYTES)


def nvl_ring_bytes(hidden_bytes: int, num_ranks: int, config: ChunkConfig) -> int:
    """DeepEP, csrc/config.hpp, get_nvl_buffer_size_hint: one ring per channel and rank of the node.

    Args:
        hidden_bytes: of one row, as hidden_bytes_of makes it.
        num_ranks: over all nodes.
        config: of dispatch or of combine; DeepEP takes the larger of the two results.
    """
    peers = _num_peers()
    head_bytes = (2 * max(num_ranks // peers, 1) + 3) * INT_BYTES
    ring_bytes = head_bytes + config.nvl_recv_tokens * (hidden_bytes + _side_bytes())
    return _aligned(config.num_channels * min(num_ranks, peers) * ring_bytes)


def rdma_ring_bytes(hidden_bytes: int, num_ranks: int, config: ChunkConfig) -> int:
    """DeepEP, csrc/config.hpp, get_rdma_buffer_size_hint: a ring to send and one to receive per channel and node.

    It is the formula alone: up to eight ranks DeepEP reserves nothing, whatever the formula gives (rdma_hint_bytes).

    Args: as nvl_ring_bytes takes them.
    """
    peers = _num_peers()
    head_bytes = (2 * peers + 2) * INT_BYTES
    ring_bytes = head_bytes + config.rdma_recv_tokens * (hidden_bytes + _side_bytes() + INT4_BYTES)
    return _aligned(config.num_channels * (num_ranks // peers) * 2 * ring_bytes)


def rdma_hint_bytes(hidden_bytes: int, num_ranks: int, config: ChunkConfig) -> int:
    """What DeepEP's get_rdma_buffer_size_hint returns: rdma_ring_bytes, and 0 inside one node."""
    return rdma_ring_bytes(hidden_bytes, num_ranks, config) if num_ranks > _num_peers() else 0


def low_latency_bytes(hidden_dim: int, max_num_tokens: int, num_experts: int) -> int:
    """DeepEP, csrc/config.hpp, get_low_latency_rdma_size_hint: everything twice, for odd and even steps.

    Args:
        hidden_dim: elements of a row; what is left of a last group of 128 has no scale.
        max_num_tokens: the most tokens that any rank brings (num_max_dispatch_tokens_per_rank).
        num_experts: over all ranks. The number of ranks has no part in it.
    """
    combine_message_bytes = INT4_BYTES + hidden_dim * BFLOAT16_BYTES
    return _low_latency_bytes(hidden_dim, max_num_tokens, num_experts, combine_message_bytes, num_experts * INT_BYTES)


def current_low_latency_bytes(hidden_dim: int, max_num_tokens: int, num_experts: int) -> int:
    """As low_latency_bytes, in July 2026: combine sends two bf16 per 128 elements, and counts are aligned."""
    bounds_bytes = hidden_dim // SCALE_GROUP * 2 * BFLOAT16_BYTES
    combine_message_bytes = bounds_bytes + hidden_dim * BFLOAT16_BYTES
    count_bytes = _aligned(num_experts * INT_BYTES)
    return _low_latency_bytes(hidden_dim, max_num_tokens, num_experts, combine_message_bytes, count_bytes)


def _low_latency_bytes(
    hidden_dim: int, max_num_tokens: int, num_experts: int, combine_message_bytes: int, count_bytes: int
) -> int:
    fp8_bytes = hidden_dim + hidden_dim // SCALE_GROUP * FLOAT_BYTES
    dispatch_message_bytes = INT4_BYTES + max(hidden_dim * BFLOAT16_BYTES, fp8_bytes)
    rows = num_experts * max_num_tokens
    send_bytes = max(max_num_tokens * dispatch_message_bytes, rows * combine_message_bytes)
    recv_bytes = rows * max(dispatch_message_bytes, combine_message_bytes)
    total_bytes = 2 * (send_bytes + recv_bytes + count_bytes)
    alignment_bytes = _alignment_bytes()
    # DeepEP adds a whole unit of alignment, also to what is aligned already.
    return (total_bytes + alignment_bytes) // alignment_bytes * alignment_bytes


def deep_ep_hints(
    *, hidden_dim: int, element_bytes: int, num_ranks: int, max_num_tokens: int, num_experts: int
) -> DeepEpHints:
    """All hints for one shape; rings are the larger of dispatch's and combine's, as DeepEP's README takes them.

    Args:
        hidden_dim: elements of a row. element_bytes: of tokens as the caller has them.
        num_ranks: over all nodes. max_num_tokens: of any rank. num_experts: over all ranks.
    """
    low_latency = low_latency_bytes(hidden_dim, max_num_tokens, num_experts)
    if num_ranks not in known_ranks():
        return DeepEpHints(None, None, low_latency)
    hidden_bytes = hidden_bytes_of(hidden_dim, element_bytes)
    configs = chunk_configs(num_ranks)
    return DeepEpHints(
        max(nvl_ring_bytes(hidden_bytes, num_ranks, config) for config in configs),
        max(rdma_hint_bytes(hidden_bytes, num_ranks, config) for config in configs),
        low_latency,
    )


def _side_bytes() -> int:
    """What travels beside a row in a ring: where it comes from, ids and weights, scales."""
    sizes = deep_ep_table()["sizes"]
    topk_bytes = sizes["num_max_topk"] * (INT64_BYTES + FLOAT_BYTES)
    return int(sizes["source_meta_bytes"] + topk_bytes + sizes["num_max_scales"] * FLOAT_BYTES)


def _num_peers() -> int:
    return int(deep_ep_table()["constants"]["num_max_nvl_peers"])


def _alignment_bytes() -> int:
    return int(deep_ep_table()["constants"]["num_buffer_alignment_bytes"])


def _aligned(num_bytes: int) -> int:
    alignment_bytes = _alignment_bytes()
    return -(-num_bytes // alignment_bytes) * alignment_bytes
