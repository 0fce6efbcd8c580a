"""AITER's groups (`aiter.dist.parallel_state`): this package's, whose communicators are AITER's."""

from __future__ import annotations

from typing import Any

from ep_a2a.compat.aiter.communicators import CudaCommunicator
from ep_a2a.parallel import state
from ep_a2a.parallel.state import (
    GroupCoordinator,
    destroy_dist_env,
    get_dp_group,
    get_ep_group,
    get_tp_group,
    in_the_same_node_as,
)

__all__ = [
    "GroupCoordinator",
    "destroy_dist_env",
    "get_dp_group",
    "get_ep_group",
    "get_tp_group",
    "in_the_same_node_as",
    "init_dist_env",
]


def init_dist_env(*args: Any, **kwargs: Any) -> None:
    """Does as ep_a2a.init_dist_env, whose arguments begin with AITER's; handles have MORI's interface."""
    state.init_dist_env(*args, **kwargs, communicator=CudaCommunicator)
