"""Symmetric memory on GPUs of one node: torch symmetric memory, or CUDA IPC where ranks share a device index.

torch symmetric memory refuses ranks that all call their GPU cuda:0 (one visible device per process, as under Ray).
CUDA IPC ignores indices and maps memory of GPUs that the process does not see.
"""

import contextlib
from typing import Any

import torch

from ep_a2a.errors import DeviceMemoryError, EpA2AError, MissingPackageError, PeerAccessError
from ep_a2a.memory.allocator_isolation import zeros_outside_pools
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.symmetric import SymmetricMemory, bytes_at


def allocate_cuda_peer(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    """Allocate a zeroed region of num_bytes on every rank's GPU, mapped by all ranks. Collective."""
    if rendezvous.world_size == 1:
        local = zeros_outside_pools(num_bytes, device)
        return SymmetricMemory(local, (local.data_ptr(),), "CUDA memory of one rank", lambda: None)
    indices = rendezvous.exchange("CUDA device index", device.index)
    if len(set(indices)) == len(indices):
        rendezvous.attempt("checking peer access", lambda: _check_peer_access(device, indices))
        return _allocate_torch_symmetric(rendezvous, device, num_bytes)
    return _allocate_ipc(rendezvous, device, num_bytes)


def _check_peer_access(device: torch.device, indices: list[int]) -> None:
    visible = range(torch.cuda.device_count())
    blocked = [
        rank
        for rank, index in enumerate(indices)
        if index in visible and index != device.index and not torch.cuda.can_device_access_peer(device, index)
    ]
    if blocked:
        raise PeerAccessError(f"{device} to reach every rank's GPU", f"no peer access to ranks {blocked}")


def _allocate_torch_symmetric(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    import torch.distributed._symmetric_memory as symm_mem
    from torch._C._distributed_c10d import _SymmetricMemory as allocator

    def allocate() -> torch.Tensor:
        try:
            # symm_mem.empty does the same, but works out strides by a function that imports sympy, which takes seconds
            tensor = allocator.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            tensor.zero_()
            torch.cuda.synchronize(device)
        except RuntimeError as cause:
            raise DeviceMemoryError(f"{num_bytes} bytes of symmetric memory on {device}", str(cause)) from cause
        return tensor

    tensor = rendezvous.attempt("allocating symmetric memory", allocate)
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


class _IpcMemory:
    """One rank's region, which CUDA's runtime has allocated, and the regions of other ranks that are open here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.address = 0
        self.opened: dict[int, int] = {}

    def allocate(self, num_bytes: int) -> str:
        """Allocates zeroed memory, and returns the handle by which other ranks open it."""
        self._runtime = runtime = _runtime()
        with torch.cuda.device(self._device):
            self.address = int(_checked(runtime.cudaMalloc(num_bytes), f"cudaMalloc of {num_bytes} bytes"))
            _checked(runtime.cudaMemset(self.address, 0, num_bytes), "cudaMemset")
            _checked(runtime.cudaDeviceSynchronize(), "cudaDeviceSynchronize")
            handle = _checked(runtime.cudaIpcGetMemHandle(self.address), "cudaIpcGetMemHandle")
        return bytes(handle.reserved).hex()

    def open(self, texts: list[str], own: int) -> None:
        """Opens the memory of all ranks but this one, by their handles."""
        runtime, flags = self._runtime, self._runtime.cudaIpcMemLazyEnablePeerAccess
        with torch.cuda.device(self._device):
            for rank, text in enumerate(texts):
                if rank != own:
                    handle = runtime.cudaIpcMemHandle_t()
                    handle.reserved = bytes.fromhex(text)
                    address = _checked(runtime.cudaIpcOpenMemHandle(handle, flags), "cudaIpcOpenMemHandle")
                    self.opened[rank] = int(address)

    def release(self) -> None:
        """Gives back whatever there is."""
        if self.address:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize(self._device)
                for address in self.opened.values():
                    _checked(self._runtime.cudaIpcCloseMemHandle(address), "cudaIpcCloseMemHandle")
                _checked(self._runtime.cudaFree(self.address), "cudaFree")


def _allocate_ipc(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    memory = _IpcMemory(device)

    def open_all(texts: list[str]) -> None:
        try:
            memory.open(texts, rendezvous.rank)
        except EpA2AError as cause:
            raise PeerAccessError("every rank's GPU memory to be mappable", str(cause)) from cause

    try:
        # the others map this rank's memory before it is released
        with rendezvous.telling("sharing memory"):
            text = rendezvous.attempt("allocating CUDA memory", lambda: memory.allocate(num_bytes))
            texts = rendezvous.exchange("CUDA IPC handles", text)
            rendezvous.attempt("mapping CUDA memory", lambda: open_all(texts))
    except BaseException:
        with contextlib.suppress(EpA2AError, RuntimeError):
            memory.release()
        raise
    addresses = tuple(memory.opened.get(rank, memory.address) for rank in range(rendezvous.world_size))
    return SymmetricMemory(bytes_at(memory.address, num_bytes, device), addresses, "CUDA IPC", memory.release)
