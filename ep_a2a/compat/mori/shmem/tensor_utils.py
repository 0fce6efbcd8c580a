"""`mori.shmem.tensor_utils`: symmetric memory as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a import shmem
from ep_a2a.compat.mori.unsupported import unsupported
from ep_a2a.compat.parameters import remedy_of
from ep_a2a.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MoriShmemBuffer",
    "mori_shmem_create_tensor",
    "mori_shmem_create_tensor_list_intra_node",
    "mori_shmem_free_tensor",
    "symm_mori_shmem_tensor",
]


class MoriShmemBuffer:
    """MORI's wrapper of an address. Not supported: the constructor raises UnsupportedError."""

    __init__ = unsupported("shmem.MoriShmemBuffer")


def mori_shmem_create_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a zeroed tensor in symmetric memory. Collective; valid until it is freed or the world ends."""
    size = torch.Size(shape)
    return shmem.shmem_malloc(size.numel() * dtype.itemsize).view(dtype).view(size)


def mori_shmem_free_tensor(tensor: torch.Tensor) -> None:
    """Frees a tensor of mori_shmem_create_tensor; local. Raises InputError for any other tensor."""
    shmem.shmem_free(tensor)


def symm_mori_shmem_tensor(tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """Returns the tensor itself if `peer` is this rank.

    Raises:
        UnsupportedError: another rank; peers' memory is not available as tensors.
    """
    if peer == shmem.shmem_mype():
        return tensor
    raise UnsupportedError(
        f"symm_mori_shmem_tensor with peer {shmem.shmem_mype()}, this rank",
        str(peer),
        remedy_of("mori", "shmem.symm_mori_shmem_tensor", "peer"),
    )


mori_shmem_create_tensor_list_intra_node = unsupported("shmem.mori_shmem_create_tensor_list_intra_node")
