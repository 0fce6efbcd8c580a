"""NVSHMEM by its host library, which CUDA builds of torch bring along: its start, symmetric memory, kernels' modules.

The library is called by ctypes: each release of its Python packages asks for other releases of CUDA's. The layouts
below are version 1 of NVSHMEM's own (host/nvshmemx_api.h), which 3.x accepts.

One NVSHMEM serves a process for as long as it lives: it is never ended, and its memory never given back, since both
wait for all ranks, one of which may be gone. A block that its owner gives back serves the next allocation of its size.
"""

import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from ep_a2a.errors import DeviceMemoryError, MissingPackageError, UnsupportedError
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.memory.symmetric import SymmetricMemory, bytes_at

SIGNAL_ADD = 10
"""NVSHMEM's number for adding to a signal (nvshmem_common_transport.h); comments in torch 2.11 give another."""
COMPARE_GE = 5
"""NVSHMEM's number for >= (nvshmem_constants.h)."""
HOST_LIBRARY = "libnvshmem_host.so.3"
NVSHMEM_KIND = "NVSHMEM"
"""`kind` of memory on NVSHMEM's heap."""
INIT_WITH_UNIQUE_ID = 8
IS_INITIALIZED = 2
UNIQUE_ID_BYTES = 128
SEE_ITS_LOG = "NVSHMEM_DEBUG=INFO makes it say why."


class _UniqueIdArguments(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("id", ctypes.c_void_p), ("rank", ctypes.c_int), ("ranks", ctypes.c_int))


class _Arguments(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("unique_id", _UniqueIdArguments), ("content", ctypes.c_char * 96))


class _Attributes(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("mpi_communicator", ctypes.c_void_p), ("arguments", _Arguments))


def _version(kind: type[ctypes.Structure] | int) -> int:
    """The first word of a structure of version 1."""
    return (1 << 16) + (kind if isinstance(kind, int) else ctypes.sizeof(kind))


def library_folder() -> Path | None:
    """The folder of nvidia-nvshmem's libraries; None without the package."""
    try:
        found = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    folders = [Path(place) / "lib" for place in (found.submodule_search_locations or ())] if found else []
    return next((folder for folder in folders if (folder / HOST_LIBRARY).exists()), None)


def device_library(device: torch.device) -> Path:
    """NVSHMEM's device functions as LLVM bitcode, for a GPU.

    Raises:
        MissingPackageError: there is none.
    """
    folder = _folder()
    major, minor = torch.cuda.get_device_capability(device)
    names = (f"libnvshmem_device_sm_{major}{minor}.bc", f"libnvshmem_device_sm_{major}0.bc", "libnvshmem_device.bc")
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise _missing(f"none of {', '.join(names)} in {folder}")
    return found


def _missing(found: str) -> MissingPackageError:
    major = (torch.version.cuda or "13").split(".")[0]
    return MissingPackageError(
        "NVSHMEM's libraries, for internode_transport 'nvshmem'",
        found,
        f"pip install nvidia-nvshmem-cu{major}, or use internode_transport 'torch.distributed'.",
    )


def _folder() -> Path:
    folder = library_folder()
    if folder is None:
        raise _missing("no package nvidia-nvshmem")
    return folder


@functools.cache
def _host_library() -> ctypes.CDLL:
    """NVSHMEM's host library: torch's own if torch has loaded it."""
    try:
        library = ctypes.CDLL(str(_folder() / HOST_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise _missing(str(error)) from error
    library.nvshmem_malloc.restype = library.nvshmem_ptr.restype = ctypes.c_void_p
    library.nvshmem_ptr.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.nvshmem_malloc.argtypes = (ctypes.c_size_t,)
    library.nvshmemx_cumodule_init.argtypes = (ctypes.c_void_p,)
    return library


@dataclass
class _Block:
    """A block at the same place of NVSHMEM's heap on every rank; lent while memory of this process is using it."""

    address: int
    num_bytes: int
    is_lent: bool = True

    def give_back(self) -> None:
        """Lets the next allocation of this size have the block."""
        self.is_lent = False


_blocks: list[_Block] = []
"""All memory that was ever taken, in the order in which all ranks took it."""


def allocate_symmetric(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> SymmetricMemory:
    """Allocates a zeroed block of NVSHMEM's heap on every rank, starting NVSHMEM first. Collective.

    A rank that no store of this one reaches has address 0.

    Args:
        rendezvous: the ranks; NVSHMEM must have exactly these.
        device: this rank's GPU.
        num_bytes: equal on all ranks.

    Raises:
        MissingPackageError: no NVSHMEM on a rank.
        UnsupportedError: it runs already, for other ranks than these.
        DeviceMemoryError: a rank had not enough.
    """
    elements = _started(rendezvous, device)
    own = [i for i, block in enumerate(_blocks) if not block.is_lent and block.num_bytes == num_bytes]
    # a block is free when all ranks have given it back, at different times
    free = rendezvous.exchange("NVSHMEM memory that is free", own)
    again = sorted(set(free[0]).intersection(*free[1:]))
    if not again:
        address = rendezvous.attempt("allocating NVSHMEM memory", lambda: _malloc(device, num_bytes))
        _blocks.append(_Block(address, num_bytes))
    block = _blocks[again[0] if again else -1]
    block.is_lent = True
    local = bytes_at(block.address, num_bytes, device)
    local.zero_()
    torch.cuda.synchronize(device)
    rendezvous.barrier("NVSHMEM memory is zeroed")
    addresses = tuple(_host_library().nvshmem_ptr(block.address, element) or 0 for element in elements)
    return SymmetricMemory(local, addresses, NVSHMEM_KIND, block.give_back, elements=elements)


def _malloc(device: torch.device, num_bytes: int) -> int:
    with torch.cuda.device(device):
        address = _host_library().nvshmem_malloc(num_bytes)
    if not address:
        raise DeviceMemoryError(f"{num_bytes} bytes of NVSHMEM's heap", "none")
    return int(address)


def load_into(module: int) -> None:
    """Register a loaded CUDA module (CUmodule) with NVSHMEM; kernels that call NVSHMEM must be in one."""
    status = _host_library().nvshmemx_cumodule_init(module)
    if status:
        raise DeviceMemoryError("NVSHMEM to take a kernel's module", f"status {status}", "See NVSHMEM's own log.")


def _started(rendezvous: Rendezvous, device: torch.device) -> tuple[int, ...]:
    """Starts NVSHMEM unless it runs, and returns by rank its number in NVSHMEM. Collective.

    One that another library of this process has started (torch's symmetric memory, DeepEP) is used if the group is all
    of it.
    """
    library = rendezvous.attempt("loading NVSHMEM", _host_library)
    found = rendezvous.exchange("NVSHMEM's state", _state(library))
    if all(each is None for each in found):
        _initialize(rendezvous, device)
        found = rendezvous.exchange("NVSHMEM's state", _state(library))
    if {each and tuple(each) for each in found} != {(i, len(found)) for i in range(len(found))}:
        raise UnsupportedError(
            f"an NVSHMEM of exactly the {len(found)} ranks of the group",
            f"(element, of how many) by rank: {found}",
            "Use internode_transport 'torch.distributed', or make this group's manager before NVSHMEM's other user.",
        )
    return tuple(each[0] for each in found)


def _state(library: ctypes.CDLL) -> list[int] | None:
    """This process's number in NVSHMEM, and of how many; None where NVSHMEM has not been started."""
    is_started = library.nvshmemx_init_status() >= IS_INITIALIZED
    return [library.nvshmem_my_pe(), library.nvshmem_n_pes()] if is_started else None


def _initialize(rendezvous: Rendezvous, device: torch.device) -> None:
    library = _host_library()
    unique_id = ctypes.create_string_buffer(UNIQUE_ID_BYTES)
    ctypes.c_int.from_buffer(unique_id).value = _version(UNIQUE_ID_BYTES)
    failed = library.nvshmemx_get_uniqueid(unique_id) if rendezvous.rank == 0 else 0
    text = rendezvous.exchange("NVSHMEM's unique id", None if failed else unique_id.raw.hex())[0]
    if text is None:
        raise UnsupportedError("NVSHMEM to start", "no unique id on rank 0", SEE_ITS_LOG)

    def start_with_the_others() -> None:
        attributes = _Attributes(version=_version(_Attributes))
        attributes.arguments.version = _version(_Arguments)
        attributes.arguments.unique_id.version = _version(_UniqueIdArguments)
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            unique_id.raw = bytes.fromhex(text)
            status = library.nvshmemx_set_attr_uniqueid_args(
                rendezvous.rank, rendezvous.world_size, unique_id, ctypes.byref(attributes)
            )
            status = status or library.nvshmemx_hostlib_init_attr(INIT_WITH_UNIQUE_ID, ctypes.byref(attributes))
        if status:
            raise UnsupportedError("NVSHMEM to start", f"status {status}", SEE_ITS_LOG)

    rendezvous.attempt("starting NVSHMEM", start_with_the_others)
