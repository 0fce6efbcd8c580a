"""Defines the simulated machines: sizes, and every constant of the model with its unit and source."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ep_a2a.errors import ConfigError

BITS_PER_BYTE = 8
START_US = 2.7
"""From the end of the kernel before until senders know where rows go. Measured: 1.0 between two launches and 1.7 in
dispatch, T = 128 (bench/results/2026-11-21_h200x2_round_trip.md)."""
NVLINK_HOP_US = 1.7
"""From a row's push until its receiver has it. Measured: 2.05 to 3.78 µs at T = 1 (same file)."""
FINISH_US = 0.3
"""From the last row to the end of the last program. Measured: 3.78 to 4.09 µs at T = 1 (same file)."""
NVLINK_GB_PER_S = 346.0
"""From one GPU to the others of its node, all pushing at once. Measured: 234.3 MB in the 677.4 µs that a round trip of
T = 4096 takes longer than one of T = 128, four H200s (bench/results/2026-11-21_h200x4_round_trip.md)."""
NIC_LATENCY_US = 8.35
"""From a put with a signal until the other GPU sees the signal. Published: half of a round trip of 16.7 µs with small
messages, GPU-initiated, H100 and ConnectX-7 (NCCL GIN, arXiv 2511.15076)."""
NIC_EFFICIENCY = 0.969
"""Payload's share of a NIC's rate. Published: 48.44 of 50 GB/s in transfers of 1 MiB (MORI, README, MORI-IO)."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs, each with a NIC of its own and NVLink to the GPUs of its node.

    Attributes:
        num_nodes, gpus_per_node: N and G; ranks are numbered node by node.
        nic_gbps: rate of a GPU's NIC in each direction, 1e9 bits per second.
        nvlink_gb_per_s: what a GPU pushes to the others of its node together, 1e9 bytes per second.
        chunk_tokens: tokens that cross to another node in one message.
        num_credits: chunks that may be on the way to one node, or wait there, per GPU.
    """

    num_nodes: int
    gpus_per_node: int = 8
    nic_gbps: float = 400.0
    nvlink_gb_per_s: float = NVLINK_GB_PER_S
    chunk_tokens: int = 64
    num_credits: int = 8

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node", "nic_gbps", "chunk_tokens", "num_credits"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError("above 0", str(getattr(self, name)), "Give a positive number.", field=name)

    @property
    def num_ranks(self) -> int:
        """W, GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def nic_gb_per_s(self) -> float:
        """Payload of a NIC, 1e9 bytes per second."""
        return self.nic_gbps / BITS_PER_BYTE * NIC_EFFICIENCY
