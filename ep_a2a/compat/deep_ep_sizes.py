"""DeepEP's buffer size hints for a shape, by its published formulas and without DeepEP.

The formulas are those of DeepEP V1 in two editions: 2025 (218c5a1, csrc/config.hpp) and 2026 (dd758ca,
csrc/legacy/config.hpp). `choose_edition`, else EP_A2A_DEEPEP_EDITION, decides for `ep_a2a.compat.deep_ep`. Chunk sizes
are in configs/deep_ep_sizes.toml.
"""

import functools
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ep_a2a import env
from ep_a2a.config.requirements import checked_integer, require
from ep_a2a.errors import UnknownNameError, UnsupportedError

FILE_NAME = "deep_ep_sizes.toml"
EDITIONS = {2025: "April 2025", 2026: "July 2026"}

INT_BYTES, INT64_BYTES, FLOAT_BYTES, INT4_BYTES, BFLOAT16_BYTES = 4, 8, 4, 16, 2
"""`INT4` is CUDA's vector of four ints."""
ALIGNMENT_BYTES = 128
NUM_NVL_PEERS = 8
"""GPUs of a node."""
MAX_TOPK = MAX_SCALES = 128
SIDE_BYTES = 2 * INT_BYTES + MAX_TOPK * (INT64_BYTES + FLOAT_BYTES) + MAX_SCALES * FLOAT_BYTES
"""Beside a row in a ring: its source, ids and weights, scales."""
SCALE_GROUP = 128
"""Elements that share a scale in DeepEP's fp8 rows."""

_edition: int | None = None


@dataclass(frozen=True)
class Config:
    """DeepEP's `Config`, which its tables have for dispatch and for combine; names, order and defaults are DeepEP's.

    Our kernels have no chunks and no rings. Of a config that is passed to dispatch or combine, only num_sms counts: the
    most multiprocessors that the launch occupies (0 = all). The other fields serve the hints.

    Attributes:
        num_sms: multiprocessors; a pair of them, one that sends and one that receives, is a channel.
        num_max_nvl_chunked_send_tokens, num_max_rdma_chunked_send_tokens: tokens that are sent at once.
        num_max_nvl_chunked_recv_tokens, num_max_rdma_chunked_recv_tokens: tokens that a ring holds.

    Raises:
        ConfigError: values that DeepEP refuses.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            checked_integer(name, value, 0 if name == "num_sms" else 1)
        require(
            self.num_max_nvl_chunked_send_tokens < self.num_max_nvl_chunked_recv_tokens,
            None,
            "num_max_nvl_chunked_send_tokens < num_max_nvl_chunked_recv_tokens",
            str(self),
        )
        two_chunks = 2 * self.num_max_rdma_chunked_send_tokens
        expected = "at least two chunks in num_max_rdma_chunked_recv_tokens"
        require(self.num_rdma_ring_tokens >= two_chunks, None, expected, str(self))

    @property
    def num_rdma_ring_tokens(self) -> int:
        """Tokens of a ring between nodes, num_max_rdma_chunked_recv_tokens rounded up to whole chunks."""
        chunk = self.num_max_rdma_chunked_send_tokens
        return -(-self.num_max_rdma_chunked_recv_tokens // chunk) * chunk

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes of DeepEP's rings inside a node: one per channel and rank of the node.

        Our ops allocate other sizes, when they are made.

        Args:
            hidden_bytes: of one row. num_ranks: over all nodes.
        """
        self._check_hint(hidden_bytes, num_ranks)
        head_bytes = (2 * max(num_ranks // NUM_NVL_PEERS, 1) + 3) * INT_BYTES
        ring_bytes = head_bytes + self.num_max_nvl_chunked_recv_tokens * (hidden_bytes + SIDE_BYTES)
        return _aligned(self.num_sms // 2 * min(num_ranks, NUM_NVL_PEERS) * ring_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes of DeepEP's rings between nodes: one to send, one to receive per channel and node.

        0 up to 8 ranks. Arguments are those of get_nvl_buffer_size_hint.
        """
        self._check_hint(hidden_bytes, num_ranks)
        if num_ranks <= NUM_NVL_PEERS:
            return 0
        head_bytes = (2 * NUM_NVL_PEERS + 2) * INT_BYTES
        ring_bytes = head_bytes + self.num_rdma_ring_tokens * (hidden_bytes + SIDE_BYTES + INT4_BYTES)
        return _aligned(self.num_sms // 2 * (num_ranks // NUM_NVL_PEERS) * 2 * ring_bytes)

    def _check_hint(self, hidden_bytes: int, num_ranks: int) -> None:
        checked_integer("hidden_bytes", hidden_bytes, 1)
        checked_integer("num_ranks", num_ranks, 1)
        is_whole = num_ranks < NUM_NVL_PEERS or num_ranks % NUM_NVL_PEERS == 0
        require(is_whole, None, f"fewer than {NUM_NVL_PEERS} ranks or a multiple of it", str(num_ranks))
        is_even = num_ranks <= NUM_NVL_PEERS or self.num_sms % 2 == 0
        require(is_even, None, f"an even num_sms for more than {NUM_NVL_PEERS} ranks", str(self.num_sms))


@functools.cache
def deep_ep_table() -> dict[str, Any]:
    """Returns the parsed data file: `configs_2025` and `configs_2026`."""
    # configs/ lies inside an installed package, in a checkout beside it
    package = Path(__file__).resolve().parents[1]
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    return tomllib.loads((folder / FILE_NAME).read_text(encoding="utf-8"))


def choose_edition(edition: int | None) -> None:
    """Chooses the edition of all numbers of this process; None leaves it to EP_A2A_DEEPEP_EDITION.

    Raises:
        UnknownNameError: there is no such edition.
    """
    global _edition
    if edition not in (None, *EDITIONS):
        raise UnknownNameError(f"out of {', '.join(map(str, EDITIONS))}", repr(edition), field="deep_ep_edition")
    _edition = edition


def edition() -> int:
    """Returns the edition that was chosen, by the process or else by the environment."""
    return env.DEEPEP_EDITION.get() if _edition is None else _edition


def known_ranks() -> tuple[int, ...]:
    """Returns the numbers of ranks that DeepEP's table has rows for."""
    return tuple(row["num_ranks"] for row in _rows())


def chunk_configs(num_ranks: int) -> tuple[Config, Config]:
    """Returns the rows of dispatch and of combine (DeepEP, get_dispatch_config and get_combine_config).

    Args:
        num_ranks: over all nodes.

    Raises:
        UnsupportedError: the table has no row for num_ranks.
    """
    for row in _rows():
        if row["num_ranks"] == num_ranks:
            return Config(row["num_sms"], *row["dispatch"]), Config(row["num_sms"], *row["combine"])
    known = ", ".join(map(str, known_ranks()))
    raise UnsupportedError(f"one of DeepEP's numbers of ranks: {known}", str(num_ranks), "Ask for one of these.")


@dataclass(frozen=True)
class LowLatencyBuffer:
    """Addresses of DeepEP's low-latency buffers for odd or for even steps. Combine's are those of dispatch.

    Attributes:
        num_clean_int: counts of received rows, int32.
        dispatch_rdma_send_buffer, dispatch_rdma_recv_data_buffer: of rows.
        dispatch_rdma_recv_count_buffer: of the counts.
        num_bytes_per_combine_msg: of a row that travels back.
    """

    num_clean_int: int
    dispatch_rdma_send_buffer: int
    dispatch_rdma_recv_data_buffer: int
    dispatch_rdma_recv_count_buffer: int
    num_bytes_per_combine_msg: int

    def clean_meta(self) -> tuple[int, int]:
        """Returns the address and the number of the int32 that DeepEP zeroes before the first step."""
        return self.dispatch_rdma_recv_count_buffer, self.num_clean_int


class LowLatencyLayout:
    """DeepEP's layout of its low-latency memory, by the formulas of the chosen edition; nothing is allocated.

    Args:
        rdma_buffer: address of the memory.
        num_max_dispatch_tokens_per_rank: the most tokens that any rank brings.
        hidden: elements of a row; the rest behind its last group of 128 has no scale.
        num_ranks: without effect. num_experts: over all ranks.

    Attributes:
        total_bytes: of all buffers. buffers: those of odd and of even steps.
    """

    def __init__(
        self, rdma_buffer: int, num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> None:
        num_scales, count_bytes = hidden // SCALE_GROUP, num_experts * INT_BYTES
        head_bytes, counts_are_first = INT4_BYTES, edition() > min(EDITIONS)
        if counts_are_first:
            # two bf16 per 128 elements travel back with a row
            head_bytes, count_bytes = num_scales * 2 * BFLOAT16_BYTES, _aligned(count_bytes)
        combine_message = head_bytes + hidden * BFLOAT16_BYTES
        fp8_bytes = hidden + num_scales * FLOAT_BYTES
        dispatch_message = INT4_BYTES + max(hidden * BFLOAT16_BYTES, fp8_bytes)
        rows = num_experts * num_max_dispatch_tokens_per_rank
        send_bytes = max(num_max_dispatch_tokens_per_rank * dispatch_message, rows * combine_message)
        recv_bytes = rows * max(dispatch_message, combine_message)
        self.total_bytes = 2 * (send_bytes + recv_bytes + count_bytes)
        data = rdma_buffer + (2 * count_bytes if counts_are_first else 0)
        counts = rdma_buffer if counts_are_first else data + 2 * (send_bytes + recv_bytes)
        self.buffers = tuple(
            LowLatencyBuffer(
                num_experts,
                data + send_bytes * step,
                data + 2 * send_bytes + recv_bytes * step,
                counts + count_bytes * step,
                combine_message,
            )
            for step in range(2)
        )


def low_latency_bytes(hidden_dim: int, max_tokens: int, num_experts: int) -> int:
    """Returns DeepEP's get_low_latency_rdma_size_hint; arguments are those of LowLatencyLayout.

    The number of ranks has no part in it.
    """
    # DeepEP adds a whole unit of alignment to a total that is aligned already
    return _aligned(LowLatencyLayout(0, max_tokens, hidden_dim, 1, num_experts).total_bytes + 1)


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = deep_ep_table()[f"configs_{edition()}"]
    return rows


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
