"""Chooses the transport between nodes, and passes the choice of network devices on to its library."""

import logging
from collections.abc import Mapping

from ep_a2a import env
from ep_a2a.config.transports import check_internode_transport
from ep_a2a.errors import UnsupportedError
from ep_a2a.log_once import log_once

logger = logging.getLogger(__name__)

NCCL_DEVICES, NVSHMEM_DEVICES = "NCCL_IB_HCA", "NVSHMEM_HCA_LIST"


def choose_transport(name: str, why_not: Mapping[str, str]) -> str:
    """Choose the transport that carries tokens between nodes.

    Args:
        name: a name in INTERNODE_TRANSPORTS. "auto" takes EP_A2A_INTERNODE_TRANSPORT; if that is "auto", too, the
            fastest transport that works here.
        why_not: the transports that cannot be used here, with the reason.

    Returns:
        Its name. With "torch.distributed" and registered transports the host exchanges blocks that kernels have
        packed; with "peer_memory" and "nvshmem" kernels do all of it. "auto" never takes "nvshmem", which has not been
        measured on a network between hosts.

    Raises:
        UnknownNameError: there is no transport of this name; the error lists the names.
        UnsupportedError: the transport cannot be used here.
    """
    asked = name if name != "auto" else env.INTERNODE_TRANSPORT.get()
    check_internode_transport(asked, "a transport between nodes")
    if asked in why_not:
        raise UnsupportedError(
            "a transport between nodes that works here",
            f"{asked!r}, and {why_not[asked]}",
            "Use 'torch.distributed' or 'auto'.",
        )
    if asked != "auto":
        return asked
    return "torch.distributed" if "peer_memory" in why_not else "peer_memory"


def name_network_devices() -> None:
    """Pass EP_A2A_RDMA_DEVICES on to NCCL and NVSHMEM, unless NCCL_IB_HCA or NVSHMEM_HCA_LIST is set.

    The first call of a process says so in the log. NCCL looks when the process makes its first communicator, so engines
    that make one earlier call this before it.

    Raises:
        EnvironmentVariableError: EP_A2A_RDMA_DEVICES is not a list of devices.
    """
    devices = env.RDMA_DEVICES.get()
    if not devices:
        return
    # NCCL takes names for prefixes unless told otherwise by "=".
    wanted = f"^={devices[1:]}" if devices.startswith("^") else f"={devices}"
    for variable, value in ((NCCL_DEVICES, wanted), (NVSHMEM_DEVICES, devices)):
        standing = env.set_unless_set(variable, value)
        if standing == value:
            log_once(logger, logging.INFO, f"EP_A2A_RDMA_DEVICES={devices} counts: {variable}={value}")
        else:
            log_once(
                logger,
                logging.WARNING,
                f"EP_A2A_RDMA_DEVICES={devices} has no effect: {variable} is {standing!r} already",
            )
