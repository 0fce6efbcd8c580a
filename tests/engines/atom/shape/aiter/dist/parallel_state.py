"""The shape of aiter.dist.parallel_state; see shape/README.md."""

from __future__ import annotations

from typing import Any

groups: dict[str, Any] = {}
"""By kind; each has a device_communicator, rank_in_group and world_size."""


def get_ep_group():
    return groups["ep"]


def get_dp_group():
    return groups["dp"]


def get_tp_group():
    return groups["tp"]
