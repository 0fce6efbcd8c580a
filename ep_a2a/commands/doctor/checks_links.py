"""Checks of how ranks reach each other: memory of other GPUs, shared memory, libraries, networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Diagnostic, first
from ep_a2a.commands.doctor.system_info import GIB, version_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.commands.doctor.system_info import SystemInfo

SMALL_SHARED_MEMORY_BYTES = GIB
"""Docker gives 64 MiB unless told otherwise; NCCL and vLLM want much more than that."""
LITTLE_LOCKED_BYTES = GIB
LOOPBACK = ("127.", "::1")
LIBRARIES = ("nvidia-nccl-", "nvidia-nvshmem-")
"""Starts of the names of packages that bring a library; the rest of the name is the CUDA version."""
MOUNT = "Mount a tmpfs there that all ranks of the host share (--ipc=host)."
INTERFACE = "For several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that they share."


def pairs_text(pairs: list[tuple[int, int]]) -> str:
    """Returns pairs of GPUs as text."""
    return ", ".join(f"{a} and {b}" for a, b in pairs)


def check_links(info: SystemInfo) -> Iterator[Diagnostic]:
    """Checks memory that ranks share, the libraries between them, and the network."""
    yield from _between_gpus(info)
    yield from _host_memory(info)
    yield from _libraries(info)
    yield from _network(info)


def _between_gpus(info: SystemInfo) -> Iterator[Diagnostic]:
    num_gpus, links, torch = len(info.driver.gpus), info.driver.links, info.torch
    if num_gpus > 1 and links:
        pairs = [links[a][b] for a in range(len(links)) for b in range(a)]
        yield Diagnostic("links", OK, ", ".join(f"{pairs.count(kind)} pairs by {kind}" for kind in sorted(set(pairs))))
    # Whether a missing pair is an error depends on the backend: backend_verdict.py judges that.
    for way, missing in info.driver.unreached().items() if num_gpus > 1 else ():
        is_known = bool(info.driver.access)
        yield from first(
            way,
            (NOTE, not is_known and way == "peer access", "not known: the driver library could not be asked"),
            (NOTE, missing, f"not between GPUs {pairs_text(missing)}"),
            (OK, is_known, f"between all {num_gpus} GPUs"),
        )
    if info.has_nvidia_gpus:
        yield from first(
            "symmetric memory",
            (
                ERROR,
                torch.works and not torch.has_symmetric_memory,
                "not in this torch",
                "Install a torch of 2.11 or later with CUDA.",
            ),
            (OK, torch.works, "torch's"),
        )
        yield from first(
            "CUDA IPC",
            (
                NOTE,
                torch.has_symmetric_memory and "cuda-bindings" not in info.installation.packages,
                "without cuda-bindings: ranks that all call their GPU cuda:0 (Ray) cannot share memory",
                "pip install cuda-bindings",
            ),
        )


def _host_memory(info: SystemInfo) -> Iterator[Diagnostic]:
    shared, limit = info.host.shared_memory, info.host.locked_memory_bytes
    space = f"{shared.free_bytes >> 20} of {shared.size_bytes >> 20} MiB free"
    yield from first(
        "/dev/shm",
        (ERROR, not shared.exists, "does not exist", MOUNT),
        (ERROR, not shared.writable, "cannot be written to", MOUNT),
        (
            ERROR,
            shared.others_may_replace,
            f"mode {shared.mode:o}: other users may remove and replace files",
            "chmod 1777 /dev/shm",
        ),
    )
    yield from first(
        "/dev/shm",
        (
            WARNING,
            shared.usable and shared.free_bytes < SMALL_SHARED_MEMORY_BYTES,
            space,
            "Enlarge it: --shm-size=16g or --ipc=host for containers, mount -o remount,size=16g /dev/shm for hosts.",
        ),
        (OK, shared.usable and not shared.others_may_replace, space),
    )
    locked = f"at most {(limit or 0) >> 10} KiB"
    yield from first(
        "locked memory",
        (OK, limit is None, "no limit"),
        (
            WARNING,
            info.rdma and (limit or 0) < LITTLE_LOCKED_BYTES,
            f"{locked}: too little to register memory for RDMA",
            "ulimit -l unlimited",
        ),
        (NOTE, True, f"{locked}; enough without RDMA"),
    )


def _libraries(info: SystemInfo) -> Iterator[Diagnostic]:
    torch, installed = info.torch, info.installation
    nccl, built = torch.nccl or "", torch.nccl_built or ""
    if torch.cuda_build is not None and not torch.problem:
        yield from first(
            "NCCL",
            (ERROR, torch.nccl is None, "not in this torch", "Install a torch with CUDA and distributed support."),
            (
                ERROR,
                built and version_numbers(nccl) < version_numbers(built),
                f"{nccl} is loaded, torch was built with {built}",
                "Unset LD_PRELOAD, LD_LIBRARY_PATH and VLLM_NCCL_SO_PATH, or install the version that torch names.",
            ),
            (NOTE, built and nccl != built, f"{nccl}; torch was built with {built}"),
            (OK, True, nccl),
        )
    if info.has_gpus:
        found = "installed" if installed.has_nvshmem else "no package nvidia-nvshmem"
        yield Diagnostic("NVSHMEM", NOTE, f"{found}; used with {env.INTERNODE_TRANSPORT.name}=nvshmem only")
    for start in LIBRARIES:
        # Two packages bring one library for different CUDA versions: the one found first is loaded.
        twice = [f"{name} {version}" for name, version in sorted(installed.packages.items()) if name.startswith(start)]
        yield from first(
            "libraries",
            (WARNING, len(twice) > 1, f"both {' and '.join(twice)}", "Uninstall the one that is not for torch's CUDA."),
        )


def _network(info: SystemInfo) -> Iterator[Diagnostic]:
    if not info.rdma:
        yield Diagnostic("RDMA", NOTE, "no devices: between nodes tokens travel over TCP")
    for port in info.rdma:
        name = f"{port.device} port {port.port}"
        yield from first(
            "RDMA",
            (
                WARNING,
                port.state != "ACTIVE",
                f"{name} is {port.state}",
                f"Mend the link, or leave it out: {env.RDMA_DEVICES.name}=^{port.device}",
            ),
            (
                WARNING,
                port.link_layer == "Ethernet" and not port.has_address,
                f"{name} has no address (GID), which RoCE needs",
                "Give its network interface an address; in containers, use the host's network.",
            ),
            (OK, True, f"{name}: {port.link_layer}, {port.rate}"),
        )
    yield from first(
        "GPUDirect RDMA",
        (
            NOTE,
            info.has_nvidia_gpus and info.rdma and not info.host.gpu_direct,
            "no nvidia_peermem: NCCL needs DMA-BUF, or copies by way of the host",
            "modprobe nvidia_peermem",
        ),
    )
    host, addresses, interface = info.host.name, info.host.addresses, info.environment.get("GLOO_SOCKET_IFNAME")
    yield from first(
        "host name",
        (OK, interface, f"{host}; gloo uses {interface} (GLOO_SOCKET_IFNAME)"),
        (NOTE, not addresses, f"{host} has no address", INTERFACE),
        (
            NOTE,
            all(address.startswith(LOOPBACK) for address in addresses),
            f"{host} is {', '.join(addresses)}, which other hosts cannot reach",
            INTERFACE,
        ),
        (OK, True, f"{host}: {', '.join(addresses)}"),
    )
