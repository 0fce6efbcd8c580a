"""AITER's groups (`aiter.dist.parallel_state`): this package's, whose communicators are AITER's."""

from typing import Any

from ep_a2a.compat.aiter.communicators import CudaCommunicator
from ep_a2a.config.file import DEFAULT_BACKEND, choose_backend
from ep_a2a.parallel import state
from ep_a2a.parallel.group_coordinator import GroupCoordinator
from ep_a2a.parallel.state import destroy_dist_env, get_dp_group, get_ep_group, get_tp_group
from ep_a2a.topology import in_the_same_node_as

__all__ = [
    "GroupCoordinator",
    "destroy_dist_env",
    "get_dp_group",
    "get_ep_group",
    "get_tp_group",
    "in_the_same_node_as",
    "init_dist_env",
]


def init_dist_env(*args: Any, all2all_backend: str | None = None, **kwargs: Any) -> None:
    """Does as ep_a2a.init_dist_env, whose arguments begin with AITER's; handles have MORI's interface.

    This package's own backend goes by AITER's name for its default, "mori".
    """
    chosen = choose_backend(all2all_backend, kwargs.get("config_file"))
    if chosen == DEFAULT_BACKEND and not all2all_backend:
        chosen = CudaCommunicator.default_backend
    state.init_dist_env(*args, **kwargs, all2all_backend=chosen, communicator=CudaCommunicator)
