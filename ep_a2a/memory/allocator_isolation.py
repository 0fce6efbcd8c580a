"""Allocates memory of this rank outside an engine's memory pools."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from ep_a2a.memory.guards import is_capturing, outside_modes


def outside_pools(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Call `make`, which allocates a tensor on `device`, so that torch's default pool serves it, outside torch's modes.

    Engines load weights within a pool that they unmap later and may not restore (vLLM's sleep mode). Pools are per
    thread, as modes are, so another thread allocates.
    """
    if device.type == "cpu" or is_capturing(device):
        with outside_modes():
            return make()
    with ThreadPoolExecutor(max_workers=1) as other:
        tensor = other.submit(make).result()
    torch.cuda.synchronize(device)  # filled on that thread's stream
    return tensor


def zeros_outside_pools(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed memory of this rank, uint8 [num_bytes], from torch's default pool."""
    return outside_pools(lambda: torch.zeros(num_bytes, dtype=torch.uint8, device=device), device)
