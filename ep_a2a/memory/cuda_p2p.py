"""Symmetric memory on GPUs of one node: torch symmetric memory, or CUDA IPC where ranks share a device index.

torch symmetric memory refuses ranks that all call their GPU cuda:0 (one visible device per process, as under Ray).
CUDA IPC ignores indices and maps memory of GPUs that the process does not see.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.errors import DeviceMemoryError, EpA2AError, MissingPackageError, PeerAccessError
from ep_a2a.memory.allocator_isolation import zeros_outside_pools
from ep_a2a.memory.symmetric import SymmetricMemory, bytes_at

if TYPE_CHECKING:
    from ep_a2a.memory.rendezvous import Rendezvous


def allocate_cuda_peer(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    """Allocate a zeroed region of num_bytes on every rank's GPU, mapped by all ranks. Collective."""
    if rendezvous.world_size == 1:
        local = zeros_outside_pools(num_bytes, device)
        return SymmetricMemory(local, (local.data_ptr(),), "CUDA memory of one rank", lambda: None)
    indices = rendezvous.exchange("CUDA device index", device.index)
    if len(set(indices)) == len(indices):
        _check_peer_access(rendezvous, device, indices)
        return _allocate_torch_symmetric(rendezvous, device, num_bytes)
    return _allocate_ipc(rendezvous, device, num_bytes)


def _check_peer_access(rendezvous: Rendezvous, device: torch.device, indices: list[int]) -> None:
    error: EpA2AError | None = None
    visible = range(torch.cuda.device_count())
    blocked = [
        rank
        for rank, index in enumerate(indices)
        if index in visible and index != device.index and not torch.cuda.can_device_access_peer(device, index)
    ]
    if blocked:
        error = PeerAccessError(f"{device} to reach every rank's GPU", f"no peer access to ranks {blocked}")
    rendezvous.agree("checking peer access", error)


def _allocate_torch_symmetric(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    import torch.distributed._symmetric_memory as symm_mem

    error: EpA2AError | None = None
    tensor = torch.empty(0)
    try:
        tensor = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        tensor.zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as cause:
        error = DeviceMemoryError(f"{num_bytes} bytes of symmetric memory on {device}", str(cause))
    rendezvous.agree("allocating symmetric memory", error)
    handle = symm_mem.rendezvous(tensor, rendezvous.group)
    held: list[Any] = [tensor, handle]
    return SymmetricMemory(tensor, tuple(handle.buffer_ptrs), "torch symmetric memory", held.clear)


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise MissingPackageError(
            "the package cuda-bindings, to share memory between ranks whose GPUs have the same index",
            str(error),
            "pip install cuda-bindings",
        ) from error
    return runtime


def _checked(result: tuple[Any, ...], what: str) -> Any:
    if int(result[0]) != 0:
        raise DeviceMemoryError(f"{what} to succeed", str(result[0]))
    return result[1] if len(result) > 1 else None


def _allocate_ipc(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    error: EpA2AError | None = None
    address, text = 0, ""
    opened: dict[int, int] = {}

    def release() -> None:
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            for peer_address in opened.values():
                _checked(runtime.cudaIpcCloseMemHandle(peer_address), "cudaIpcCloseMemHandle")
            _checked(runtime.cudaFree(address), "cudaFree")

    try:
        runtime = _runtime()
        with torch.cuda.device(device):
            address = int(_checked(runtime.cudaMalloc(num_bytes), f"cudaMalloc of {num_bytes} bytes"))
            _checked(runtime.cudaMemset(address, 0, num_bytes), "cudaMemset")
            _checked(runtime.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
            text = bytes(_checked(runtime.cudaIpcGetMemHandle(address), "cudaIpcGetMemHandle").reserved).hex()
    except EpA2AError as cause:
        error = cause
    try:
        rendezvous.agree("allocating CUDA memory", error)
        texts = rendezvous.exchange("CUDA IPC handles", text)
        try:
            with torch.cuda.device(device):
                for rank, other in enumerate(texts):
                    if rank != rendezvous.rank:
                        opened[rank] = _open_ipc(runtime, other)
        except EpA2AError as cause:
            error = PeerAccessError("every rank's GPU memory to be mappable", str(cause))
        rendezvous.agree("mapping CUDA memory", error)
    except BaseException:
        if address:
            with contextlib.suppress(EpA2AError, RuntimeError):
                release()
        raise
    local = bytes_at(address, num_bytes, device)
    addresses = tuple(opened.get(rank, address) for rank in range(rendezvous.world_size))
    return SymmetricMemory(local, addresses, "CUDA IPC", release)


def _open_ipc(runtime: Any, text: str) -> int:
    handle = runtime.cudaIpcMemHandle_t()
    handle.reserved = bytes.fromhex(text)
    return int(
        _checked(runtime.cudaIpcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle")
    )
