"""SymmetricMemory: one region per rank, and the addresses at which this process reaches them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class SymmetricMemory:
    """One region of equal size on every rank of a group.

    Attributes:
        local: this rank's region, uint8 [num_bytes]; zero after allocation.
        peer_addresses: by rank, the address at which this process (or its GPU) reaches that rank's region.
        kind: how the memory is shared, for logs.
        elements: by rank, its number in NVSHMEM.
        release: gives this rank's mappings back. Local. On a GPU no tensor over `local` may be left.
    """

    local: torch.Tensor
    peer_addresses: tuple[int, ...]
    kind: str
    release: Callable[[], None] = field(repr=False)
    closed: bool = False
    elements: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.elements = self.elements or tuple(range(len(self.peer_addresses)))

    @property
    def num_bytes(self) -> int:
        """Bytes of one rank's region."""
        return self.local.numel()

    def close(self) -> None:
        """Give the mappings back; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self.release()


class _DeviceBytes:
    """GPU memory at an address, as an object that torch.as_tensor accepts."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def bytes_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """GPU memory that torch did not allocate, as uint8 [num_bytes]. The tensor does not own it."""
    import torch

    return torch.as_tensor(_DeviceBytes(address, num_bytes), device=device)
