"""Chooses the kind of symmetric memory for a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.errors import ConfigMismatchError

if TYPE_CHECKING:
    import torch

    from ep_a2a.memory.rendezvous import Rendezvous
    from ep_a2a.memory.symmetric import SymmetricMemory


def allocate_symmetric(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    """Allocates one region on every rank. Collective.

    Args:
        rendezvous: the ranks that take part.
        device: cpu or a CUDA device.
        num_bytes: size of the region, > 0; must be equal on all ranks.

    Raises:
        ConfigMismatchError: ranks ask for different sizes.
        HostMemoryError, DeviceMemoryError, PeerAccessError: the memory cannot be had or shared.
    """
    sizes = rendezvous.exchange("symmetric memory size", [num_bytes, device.type])
    if any(size != sizes[0] for size in sizes):
        raise ConfigMismatchError("the same size and kind of symmetric memory on all ranks", f"by rank {sizes}")
    if device.type == "cpu":
        from ep_a2a.memory.host_shm import allocate_host_shared

        return allocate_host_shared(rendezvous, num_bytes)
    from ep_a2a.memory.cuda_p2p import allocate_cuda_peer

    return allocate_cuda_peer(rendezvous, device, num_bytes)
