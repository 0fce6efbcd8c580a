"""Describes the operating system: folders, limits, network names, RDMA devices."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import stat
import sys
import sysconfig
from pathlib import Path

from ep_a2a import env
from ep_a2a.commands.doctor.system_info import Folder, Host, RdmaPort
from ep_a2a.path_security import why_unsafe

SHARED_MEMORY = Path("/dev/shm")
INFINIBAND = Path("/sys/class/infiniband")
MODULES = Path("/sys/module")
GPU_DIRECT_MODULES = ("nvidia_peermem", "nv_peer_mem")
COMPILERS = ("cc", "gcc", "clang")
UNSET_ADDRESS = "0000:0000:0000:0000:0000:0000:0000:0000"


def find_host(triton_cache: str) -> Host:
    """Describes the host.

    Args:
        triton_cache: where Triton keeps compiled kernels; "" where that is not known.
    """
    cache = triton_cache or env.other_variable("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    return Host(
        python=sys.version_info[:3],
        system=platform.system(),
        locked_memory_bytes=_locked_memory(),
        shared_memory=find_folder(SHARED_MEMORY),
        triton_cache=find_folder(Path(cache)),
        compiler=_compiler(),
        python_header=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        name=socket.gethostname(),
        addresses=_addresses(),
        gpu_direct=next((name for name in GPU_DIRECT_MODULES if (MODULES / name).exists()), ""),
    )


def find_folder(path: Path) -> Folder:
    """Describes a folder; for one that does not exist, whether it could be made."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    space = os.statvfs(there)
    status = there.stat()
    return Folder(
        path=str(path),
        exists=path.is_dir(),
        writable=os.access(there, os.W_OK | os.X_OK),
        owner=status.st_uid,
        mode=stat.S_IMODE(status.st_mode),
        size_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        no_exec=bool(space.f_flag & os.ST_NOEXEC),
        unsafe=why_unsafe(path),
    )


def find_rdma_ports(root: Path = INFINIBAND) -> tuple[RdmaPort, ...]:
    """Returns the ports of all RDMA devices, in the order of their names."""
    if not root.is_dir():
        return ()
    ports = sorted(path for device in root.iterdir() for path in (device / "ports").glob("*"))
    return tuple(_port(path) for path in ports)


def _port(path: Path) -> RdmaPort:
    # "4: ACTIVE"
    state = _text(path / "state").rpartition(":")[2].strip()
    addresses = {_text(entry) for entry in (path / "gids").glob("*")} - {"", UNSET_ADDRESS}
    return RdmaPort(
        device=path.parent.parent.name,
        port=path.name,
        state=state or "unknown",
        link_layer=_text(path / "link_layer"),
        rate=_text(path / "rate"),
        has_address=bool(addresses),
    )


def _text(path: Path) -> str:
    # The kernel refuses to read an empty entry of an address table.
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


def _locked_memory() -> int | None:
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _compiler() -> str:
    named = env.other_variable("CC")
    return next(filter(None, map(shutil.which, [*([named] if named else []), *COMPILERS])), "")


def _addresses() -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, proto=socket.IPPROTO_TCP)
        return tuple(sorted({str(entry[4][0]) for entry in found}))
    return ()
