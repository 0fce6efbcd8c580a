"""DeepEP's `Config`: its chunk sizes, which our kernels do not have, and the size hints that follow from them."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, replace

from ep_a2a.compat.deep_ep_sizes import ChunkConfig, chunk_configs, num_nvl_peers, nvl_ring_bytes, rdma_hint_bytes
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import ConfigError


@dataclass(frozen=True)
class Config(ChunkConfig):
    """The chunk sizes of DeepEP's normal kernels; names, order and defaults are DeepEP's.

    Our kernels have no chunks and no rings. Of a config that is passed to dispatch or combine, only num_sms counts: the
    most multiprocessors that the launch occupies (0 = all). The other fields serve the hints.

    Raises:
        ConfigError: values that DeepEP refuses.
    """

    def __post_init__(self) -> None:
        rdma_send = self.num_max_rdma_chunked_send_tokens
        for name, value in asdict(self).items():
            checked_integer(name, value, 0)
        _require(
            0 < self.num_max_nvl_chunked_send_tokens < self.num_max_nvl_chunked_recv_tokens,
            "0 < num_max_nvl_chunked_send_tokens < num_max_nvl_chunked_recv_tokens",
            self,
        )
        _require(rdma_send > 0, "num_max_rdma_chunked_send_tokens > 0", rdma_send)
        _require(
            self.num_rdma_ring_tokens >= 2 * rdma_send, "at least two chunks in num_max_rdma_chunked_recv_tokens", self
        )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes of DeepEP's rings inside a node. Our ops allocate other sizes, when they are made."""
        self._check_hint(hidden_bytes, num_ranks)
        return nvl_ring_bytes(hidden_bytes, num_ranks, self)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes of DeepEP's rings between nodes; 0 up to 8 ranks."""
        self._check_hint(hidden_bytes, num_ranks)
        return rdma_hint_bytes(hidden_bytes, num_ranks, self)

    def _check_hint(self, hidden_bytes: int, num_ranks: int) -> None:
        peers = num_nvl_peers()
        _require(hidden_bytes > 0, "hidden_bytes > 0", hidden_bytes)
        _require(
            0 < num_ranks < peers or (num_ranks > 0 and num_ranks % peers == 0),
            f"fewer than {peers} ranks or a multiple of it",
            num_ranks,
        )
        _require(
            num_ranks <= peers or self.num_sms % 2 == 0, f"an even num_sms for more than {peers} ranks", self.num_sms
        )


def recommended_configs(num_ranks: int, num_sms: int) -> tuple[Config, Config]:
    """Returns DeepEP's configs of dispatch and of combine for this number of ranks, with num_sms.

    Raises:
        UnsupportedError: DeepEP's table of the chosen edition has no row for num_ranks (configs/deep_ep_sizes.toml).
    """
    dispatch, combine = (Config(*astuple(row)) for row in chunk_configs(num_ranks))
    return replace(dispatch, num_sms=num_sms), replace(combine, num_sms=num_sms)


def _require(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(expected, str(got))
