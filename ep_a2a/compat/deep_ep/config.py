"""DeepEP's `Config`: its sizes of chunks, which our kernels do not have, and the size hints that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ep_a2a.compat.deep_ep_sizes import CURRENT, ChunkConfig, chunk_configs, nvl_ring_bytes, rdma_hint_bytes
from ep_a2a.errors import ConfigError

NUM_NVL_PEERS = 8
"""GPUs of a node in DeepEP's formulas."""


@dataclass(frozen=True)
class Config:
    """How DeepEP's normal kernels cut their work; names, order and defaults are DeepEP's.

    Our kernels have no chunks and rings. Of a config that is passed to dispatch or combine, num_sms counts: the most
    multiprocessors that the launch occupies (0 = all). The rest serves the hints.

    Raises:
        ConfigError: values that DeepEP refuses, too.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        rdma_send = self.num_max_rdma_chunked_send_tokens
        _require(self.num_sms >= 0, "num_sms >= 0", self.num_sms)
        _require(
            0 < self.num_max_nvl_chunked_send_tokens < self.num_max_nvl_chunked_recv_tokens,
            "0 < num_max_nvl_chunked_send_tokens < num_max_nvl_chunked_recv_tokens", self,
        )  # fmt: skip
        _require(rdma_send > 0, "num_max_rdma_chunked_send_tokens > 0", rdma_send)
        whole_chunks = -(-self.num_max_rdma_chunked_recv_tokens // rdma_send) * rdma_send
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", whole_chunks)
        _require(whole_chunks >= 2 * rdma_send, "at least two chunks in num_max_rdma_chunked_recv_tokens", self)

    @property
    def chunks(self) -> ChunkConfig:
        """The same numbers as the formulas take them."""
        return ChunkConfig(
            self.num_sms, self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens,
            self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens,
        )  # fmt: skip

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that DeepEP's rings inside a node take; ours are taken when an op is made, and are others."""
        _check_ranks(num_ranks)
        return nvl_ring_bytes(hidden_bytes, num_ranks, self.chunks)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that DeepEP's rings between nodes take; 0 up to 8 ranks."""
        _check_ranks(num_ranks)
        return rdma_hint_bytes(hidden_bytes, num_ranks, self.chunks)


def recommended_configs(num_ranks: int, num_sms: int) -> tuple[Config, Config]:
    """DeepEP's configs of dispatch and of combine for this number of ranks (configs/deep_ep_sizes.toml, July 2026).

    Raises:
        UnsupportedError: its table has none for num_ranks.
    """
    dispatch, combine = (
        Config(c.num_sms, c.nvl_send_tokens, c.nvl_recv_tokens, c.rdma_send_tokens, c.rdma_recv_tokens)
        for c in chunk_configs(num_ranks, CURRENT)
    )
    return replace(dispatch, num_sms=num_sms), replace(combine, num_sms=num_sms)


def _check_ranks(num_ranks: int) -> None:
    _require(
        0 < num_ranks < NUM_NVL_PEERS or num_ranks % NUM_NVL_PEERS == 0,
        f"fewer than {NUM_NVL_PEERS} ranks or a multiple of it", num_ranks,
    )  # fmt: skip


def _require(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(expected, str(got))
