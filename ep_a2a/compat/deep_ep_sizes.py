"""DeepEP's buffer size hints for a shape, by its published formulas and without DeepEP.

The formulas are those of DeepEP V1 in two versions. EARLY is early 2025 (csrc/config.hpp): `deep_ep_hints` and
`ep-a2a plan` use it. CURRENT is July 2026 (dd758ca, csrc/legacy/config.hpp): `ep_a2a.compat.deep_ep` uses it.
Constants and chunk sizes are in configs/deep_ep_sizes.toml.
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
"""The versions, by the name of their table of chunk sizes in the file."""
INT_BYTES, INT64_BYTES, FLOAT_BYTES, INT4_BYTES, BFLOAT16_BYTES = 4, 8, 4, 16, 2
"""`INT4` is CUDA's vector of four ints."""
SCALE_GROUP = 128
"""Elements that share a scale in DeepEP's fp8 rows."""


@dataclass(frozen=True)
class ChunkConfig:
    """A row of DeepEP's tables, of dispatch or of combine. Names, order and defaults are those of DeepEP's `Config`.

    Attributes:
        num_sms: multiprocessors; a pair of them, one that sends and one that receives, is a channel.
        num_max_nvl_chunked_send_tokens, num_max_rdma_chunked_send_tokens: tokens that are sent at once.
        num_max_nvl_chunked_recv_tokens, num_max_rdma_chunked_recv_tokens: tokens that a ring holds.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256


@dataclass(frozen=True)
class DeepEpHints:
    """Bytes that DeepEP asks for on each GPU.

    Attributes:
        nvl_bytes: rings between GPUs of a node; None if the table has no row for this number of ranks.
        rdma_bytes: rings between nodes; None likewise, 0 inside one node.
        low_latency_bytes: buffers of the low-latency kernels, which use no rings.
    """

    nvl_bytes: int | None
    rdma_bytes: int | None
    low_latency_bytes: int


@functools.cache
def deep_ep_table() -> dict[str, Any]:
    """Returns the parsed data file: `constants`, `sizes`, `configs` and `configs_2026`."""
    return tomllib.loads((shipped_directory() / FILE_NAME).read_text(encoding="utf-8"))


def known_ranks(table: str = EARLY) -> tuple[int, ...]:
    """Returns the numbers of ranks that DeepEP's table has rows for."""
    return tuple(row["num_ranks"] for row in deep_ep_table()[table])


def chunk_configs(num_ranks: int, table: str = EARLY) -> tuple[ChunkConfig, ChunkConfig]:
    """Returns the rows of dispatch and of combine (DeepEP, get_dispatch_config and get_combine_config).

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
    """Returns the bytes of a row in the hints, at least those of bf16 (DeepEP, README, get_hidden_bytes)."""
    return hidden_dim * max(element_bytes, BFLOAT16_BYTES)


def nvl_ring_bytes(hidden_bytes: int, num_ranks: int, config: ChunkConfig) -> int:
    """Returns DeepEP's get_nvl_buffer_size_hint (csrc/config.hpp): a ring per channel and rank of the node.

    Args:
        hidden_bytes: of one row, as hidden_bytes_of returns it.
        num_ranks: over all nodes.
        config: of dispatch or of combine; DeepEP takes the larger of the two results.
    """
    peers = num_nvl_peers()
    head_bytes = (2 * max(num_ranks // peers, 1) + 3) * INT_BYTES
    ring_bytes = head_bytes + config.num_max_nvl_chunked_recv_tokens * (hidden_bytes + _side_bytes())
    return _aligned(config.num_sms // 2 * min(num_ranks, peers) * ring_bytes)


def rdma_ring_bytes(hidden_bytes: int, num_ranks: int, config: ChunkConfig) -> int:
    """Returns the bytes of rings between nodes (csrc/config.hpp): one to send, one to receive per channel and node.

    DeepEP reserves none up to eight ranks, whatever this formula gives: see rdma_hint_bytes. Arguments are those of
    nvl_ring_bytes.
    """
    peers = num_nvl_peers()
    head_bytes = (2 * peers + 2) * INT_BYTES
    row_bytes = hidden_bytes + _side_bytes() + INT4_BYTES
    ring_bytes = head_bytes + config.num_max_rdma_chunked_recv_tokens * row_bytes
    return _aligned(config.num_sms // 2 * (num_ranks // peers) * 2 * ring_bytes)


def rdma_hint_bytes(hidden_bytes: int, num_ranks: int, config: ChunkConfig) -> int:
    """Returns DeepEP's get_rdma_buffer_size_hint: rdma_ring_bytes, or 0 inside one node."""
    return rdma_ring_bytes(hidden_bytes, num_ranks, config) if num_ranks > num_nvl_peers() else 0


def low_latency_bytes(hidden_dim: int, max_num_tokens: int, num_experts: int, table: str = EARLY) -> int:
    """Returns DeepEP's get_low_latency_rdma_size_hint: all buffers twice, for odd and even steps.

    Args:
        hidden_dim: elements of a row; the rest behind its last group of 128 has no scale.
        max_num_tokens: the most tokens that any rank brings (num_max_dispatch_tokens_per_rank).
        num_experts: over all ranks. The number of ranks has no part in it.
        table: EARLY; or CURRENT, in which combine sends two bf16 per 128 elements, and counts are aligned.
    """
    num_scales, count_bytes = hidden_dim // SCALE_GROUP, num_experts * INT_BYTES
    head_bytes = INT4_BYTES
    if table == CURRENT:
        head_bytes, count_bytes = num_scales * 2 * BFLOAT16_BYTES, _aligned(count_bytes)
    combine_message_bytes = head_bytes + hidden_dim * BFLOAT16_BYTES
    fp8_bytes = hidden_dim + num_scales * FLOAT_BYTES
    dispatch_message_bytes = INT4_BYTES + max(hidden_dim * BFLOAT16_BYTES, fp8_bytes)
    rows = num_experts * max_num_tokens
    send_bytes = max(max_num_tokens * dispatch_message_bytes, rows * combine_message_bytes)
    recv_bytes = rows * max(dispatch_message_bytes, combine_message_bytes)
    total_bytes = 2 * (send_bytes + recv_bytes + count_bytes)
    # DeepEP adds a whole unit of alignment to a total that is aligned already
    return _aligned(total_bytes + 1)


def deep_ep_hints(
    *, hidden_dim: int, element_bytes: int, num_ranks: int, max_num_tokens: int, num_experts: int
) -> DeepEpHints:
    """Returns all hints for one shape; a ring is the larger of dispatch's and combine's, as in DeepEP's README.

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
    """Returns the bytes beside a row in a ring: its source, ids and weights, scales."""
    sizes = deep_ep_table()["sizes"]
    topk_bytes = sizes["num_max_topk"] * (INT64_BYTES + FLOAT_BYTES)
    return int(sizes["source_meta_bytes"] + topk_bytes + sizes["num_max_scales"] * FLOAT_BYTES)


def num_nvl_peers() -> int:
    """Returns the GPUs of a node in DeepEP's formulas."""
    return int(deep_ep_table()["constants"]["num_max_nvl_peers"])


def _aligned(num_bytes: int) -> int:
    alignment_bytes = int(deep_ep_table()["constants"]["num_buffer_alignment_bytes"])
    return -(-num_bytes // alignment_bytes) * alignment_bytes
