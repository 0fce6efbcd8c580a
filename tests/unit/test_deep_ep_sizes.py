"""DeepEP's size hints: the worked example, and every row of its table."""

from dataclasses import astuple

import pytest

from ep_a2a.compat import deep_ep, install, uninstall
from ep_a2a.compat import deep_ep_sizes as sizes
from ep_a2a.compat.deep_ep_sizes import Config
from ep_a2a.errors import UnknownNameError, UnsupportedError
from ep_a2a.managers.external.deepep import RANK_COUNTS
from tests.cases.tables import read_table

TABLES = read_table("deep_ep")
ROWS = [
    (year, int(num_ranks), row if year == 2025 else (20, *row))
    for year, table in ((2025, "chunks_and_hints_of_v1"), (2026, "chunks_and_hints"))
    for num_ranks, row in TABLES[table].items()
]
"""By edition and ranks: multiprocessors, tokens (nvl sent, nvl held, rdma sent, rdma held) of dispatch and of combine,
then the NVL and the RDMA hint for rows of 7168 bf16. Those of 2025 are what DeepEP's csrc/config.hpp at 218c5a1 gave,
compiled. Those of 2026 were worked out apart from deep_ep/buffers/legacy.py of dd758ca: 10 channels, rings of 16392
bytes a token (16408 rdma), rdma rings of whole chunks.
"""
LOW_LATENCY = {2025: 1_881_147_520, 2026: 1_908_410_496}


@pytest.fixture(autouse=True)
def _edition(monkeypatch):
    monkeypatch.setenv("EP_A2A_DEEPEP_EDITION", "2025")


@pytest.mark.parametrize("year", LOW_LATENCY)
def test_the_table_is_complete(monkeypatch, year):
    monkeypatch.setenv("EP_A2A_DEEPEP_EDITION", str(year))
    assert sizes.known_ranks() == tuple(num_ranks for of, num_ranks, _ in ROWS if of == year)
    assert year == 2025 or sizes.known_ranks() == RANK_COUNTS


@pytest.mark.parametrize(("year", "num_ranks", "row"), ROWS)
def test_every_row(monkeypatch, year, num_ranks, row):
    monkeypatch.setenv("EP_A2A_DEEPEP_EDITION", str(year))
    num_sms, dispatch, combine, nvl_bytes, rdma_bytes = row
    configs = (deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks))
    assert configs == (Config(num_sms, *dispatch), Config(num_sms, *combine))
    assert sizes.low_latency_bytes(7168, 128, 256) == LOW_LATENCY[year]
    assert max(config.get_nvl_buffer_size_hint(7168 * 2, num_ranks) for config in configs) == nvl_bytes
    assert max(config.get_rdma_buffer_size_hint(7168 * 2, num_ranks) for config in configs) == rdma_bytes


def test_other_numbers_of_ranks_have_no_rings():
    with pytest.raises(UnsupportedError, match="2, 4, 8, 16, 24"):
        sizes.chunk_configs(6)


@pytest.mark.parametrize(
    ("year", "total_bytes", "buffers"),
    [
        (2025, 242_491_656, [(4096, 121_249_792, 242_495_488), (60_626_944, 181_872_640, 242_495_620)]),
        (2026, 246_006_272, [(4608, 123_007_488, 4096), (61_506_048, 184_508_928, 4352)]),
    ],
)
def test_the_low_latency_layout_is_deep_eps(monkeypatch, year, total_bytes, buffers):
    """Numbers of LowLatencyLayout of both commits, compiled."""
    monkeypatch.setenv("EP_A2A_DEEPEP_EDITION", str(year))
    layout = deep_ep.LowLatencyLayout(4096, 128, 7168, 8, 33)
    assert layout.total_bytes == total_bytes
    for found, (send, data, counts) in zip(layout.buffers, buffers):
        assert (found.dispatch_rdma_send_buffer, found.dispatch_rdma_recv_data_buffer) == (send, data)
        assert found.clean_meta() == (counts, 33)
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 11, 33) == -(-(total_bytes + 1) // 128) * 128


def test_buffer_and_config_follow_the_edition(monkeypatch):
    def numbers() -> tuple[int, int, tuple[int, ...]]:
        config = deep_ep.Buffer.get_dispatch_config(16)
        rdma_bytes = config.get_rdma_buffer_size_hint(7168 * 2, 16)
        return deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 16, 256), rdma_bytes, astuple(config)

    early = (1_881_147_520, 91_887_744, (20, 16, 288, 20, 128))
    now = (1_908_410_496, 91_887_744, (20, 36, 288, 20, 128))
    assert numbers() == early
    monkeypatch.delenv("EP_A2A_DEEPEP_EDITION")
    assert numbers() == now
    try:
        install("deep_ep", deep_ep_edition=2025)
        assert numbers() == early
        with pytest.raises(UnknownNameError, match="2025, 2026"):
            install("deep_ep", deep_ep_edition=2024)
    finally:
        uninstall("deep_ep")
    assert numbers() == now
