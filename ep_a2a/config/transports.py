"""The registry of transports between nodes: names, and makers of those whose blocks the host moves."""

import importlib
from collections.abc import Callable
from typing import Any

from ep_a2a.errors import ConfigError, UnknownNameError, shown

TransportMaker = Callable[..., Any]
"""Called as maker(group, grid, timeout_secs); returns an ep_a2a.memory.node_transport.NodeTransport."""

INTERNODE_TRANSPORTS: dict[str, str | TransportMaker | None] = {
    "auto": None,
    "torch.distributed": "ep_a2a.memory.node_transport:NodeAllToAll",
    "peer_memory": None,
    "nvshmem": None,
}
"""Makers, or "module:Class", by name. None: kernels move the tokens; with "auto" the package chooses."""


def register_internode_transport(name: str, maker: str | TransportMaker) -> None:
    """Makes a transport between nodes available by name in this process; do it on every rank.

    Args:
        name: a value of `internode_transport` and of EP_A2A_INTERNODE_TRANSPORT.
        maker: a subclass of NodeTransport, a callable with its arguments, or "module:Class", imported at first use.

    Raises:
        ConfigError: the name is taken.
    """
    if name in INTERNODE_TRANSPORTS:
        raise ConfigError("a transport's name that is not taken", repr(name), "Use another name.")
    INTERNODE_TRANSPORTS[name] = maker


def check_internode_transport(name: str, field: str) -> None:
    """Raises UnknownNameError, which names `field` and lists the transports, unless `name` is one of them."""
    if name not in list(INTERNODE_TRANSPORTS):
        known = ", ".join(map(repr, INTERNODE_TRANSPORTS))
        raise UnknownNameError(f"out of {known}", shown(name), field=field)


def transport_maker(name: str) -> TransportMaker:
    """Returns the maker of a transport whose blocks the host moves."""
    maker = INTERNODE_TRANSPORTS[name]
    if isinstance(maker, str):
        module, _, attribute = maker.partition(":")
        maker = getattr(importlib.import_module(module), attribute)
    assert maker is not None
    return maker
