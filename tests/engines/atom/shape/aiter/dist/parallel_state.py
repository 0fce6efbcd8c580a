"""The shape of aiter.dist.parallel_state; see shape/README.md."""

from typing import Any

groups: dict[str, Any] = {}
"""By kind; each has a device_communicator."""


def get_ep_group():
    return groups["ep"]
