"""The interface of symmetric memory, and the choice of its kind for a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ep_a2a.errors import ConfigMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ep_a2a.memory.rendezvous import Rendezvous


@dataclass
class SymmetricMemory:
    """One region of equal size on every rank of a group.

    Attributes:
        local: this rank's region, uint8 [num_bytes]; zero after allocation.
        peer_addresses: by rank, where this process (or its GPU) reaches that rank's region.
        kind: how it is shared, for logs.
        release: gives this rank's mappings back; local, not collective. Tensors made of `local` must be gone on a GPU.
    """

    local: torch.Tensor
    peer_addresses: tuple[int, ...]
    kind: str
    release: Callable[[], None] = field(repr=False)
    closed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's region."""
        return self.local.numel()

    def close(self) -> None:
        """Gives the mappings back; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self.release()

    def __enter__(self) -> SymmetricMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
