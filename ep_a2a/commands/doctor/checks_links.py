"""Checks of how ranks reach each other: memory of other GPUs, shared memory, libraries, networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.checks_gpu import nvidia
from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Case, Check, always, the_machine
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
SPACE = "{it.free_bytes:MiB} of {it.size_bytes:MiB} MiB free"
LOCKED = "at most {it.host.locked_memory_bytes:KiB} KiB"
INTERFACE = "For several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that they share."


def pairs_text(pairs: list[tuple[int, int]]) -> str:
    """Pairs of GPUs as text."""
    return ", ".join(f"{a} and {b}" for a, b in pairs)


def _kinds_of_links(info: SystemInfo) -> Iterator[str]:
    links = info.driver.links
    if len(info.driver.gpus) > 1 and links:
        pairs = [links[a][b] for a in range(len(links)) for b in range(a)]
        yield ", ".join(f"{pairs.count(kind)} pairs by {kind}" for kind in sorted(set(pairs)))


def _reach(info: SystemInfo) -> Iterator[tuple[str, bool, str, int]]:
    """(way of access, whether it is known, pairs without it, number of GPUs)."""
    num_gpus = len(info.driver.gpus)
    if num_gpus > 1:
        for way, missing in info.driver.unreached().items():
            yield way, bool(info.driver.access), pairs_text(missing), num_gpus


def _twice(info: SystemInfo) -> Iterator[str]:
    """Packages that bring one library for different CUDA versions: the one that is found first is loaded."""
    for start in LIBRARIES:
        found = [f"{name} {v}" for name, v in sorted(info.installation.packages.items()) if name.startswith(start)]
        if len(found) > 1:
            yield " and ".join(found)


LINKS = (
    Check("links", _kinds_of_links, Case(OK, always, "{it}")),
    # Whether a missing pair is an error depends on the backend: backend_verdict.py judges that.
    Check("{it[0]}", _reach,
        Case(NOTE, lambda it: not it[1] and it[0] == "peer access",
             "not known: the driver library could not be asked"),
        Case(NOTE, lambda it: it[2], "not between GPUs {it[2]}"),
        Case(OK, lambda it: it[1], "between all {it[3]} GPUs")),
    Check("symmetric memory", nvidia,
        Case(ERROR, lambda it: it.torch.works and not it.torch.has_symmetric_memory, "not in this torch",
             "Install a torch of 2.11 or later with CUDA."),
        Case(OK, lambda it: it.torch.works, "torch's")),
    Check("CUDA IPC", nvidia,
        Case(NOTE, lambda it: it.torch.has_symmetric_memory and "cuda-bindings" not in it.installation.packages,
             "without cuda-bindings: ranks that all call their GPU cuda:0 (Ray) cannot share memory",
             "pip install cuda-bindings")),
    Check("/dev/shm", lambda info: (info.host.shared_memory,),
        Case(ERROR, lambda it: not it.exists, "does not exist",
             "Mount a tmpfs there that all ranks of the host share (--ipc=host)."),
        Case(ERROR, lambda it: not it.writable, "cannot be written to",
             "Mount a tmpfs there that all ranks of the host share (--ipc=host)."),
        Case(ERROR, lambda it: it.others_may_replace, "mode {it.mode:o}: other users may remove and replace files",
             "chmod 1777 /dev/shm")),
    Check("/dev/shm", lambda info: (info.host.shared_memory,),
        Case(WARNING, lambda it: it.usable and it.free_bytes < SMALL_SHARED_MEMORY_BYTES, SPACE,
             "Enlarge it: --shm-size=16g or --ipc=host for containers, mount -o remount,size=16g /dev/shm for hosts."),
        Case(OK, lambda it: it.usable and not it.others_may_replace, SPACE)),
    Check("locked memory", the_machine,
        Case(OK, lambda it: it.host.locked_memory_bytes is None, "no limit"),
        Case(WARNING, lambda it: it.rdma and it.host.locked_memory_bytes < LITTLE_LOCKED_BYTES,
             f"{LOCKED}: too little to register memory for RDMA", "ulimit -l unlimited"),
        Case(NOTE, always, f"{LOCKED}; enough without RDMA")),
    Check("NCCL", lambda info: (info.torch,) if info.torch.cuda_build is not None and not info.torch.problem else (),
        Case(ERROR, lambda it: it.nccl is None, "not in this torch",
             "Install a torch with CUDA and distributed support."),
        Case(ERROR, lambda it: it.nccl_built and version_numbers(it.nccl) < version_numbers(it.nccl_built),
             "{it.nccl} is loaded, torch was built with {it.nccl_built}",
             "Unset LD_PRELOAD, LD_LIBRARY_PATH and VLLM_NCCL_SO_PATH, or install the version that torch names."),
        Case(NOTE, lambda it: it.nccl_built and it.nccl != it.nccl_built,
             "{it.nccl}; torch was built with {it.nccl_built}"),
        Case(OK, always, "{it.nccl}")),
    Check("NVSHMEM", lambda info: (info,) if info.has_gpus else (),
        Case(NOTE, lambda it: it.installation.has_nvshmem,
             f"installed; used with {env.INTERNODE_TRANSPORT.name}=nvshmem only"),
        Case(NOTE, always, f"no package nvidia-nvshmem; used with {env.INTERNODE_TRANSPORT.name}=nvshmem only")),
    Check("libraries", _twice,
        Case(WARNING, always, "both {it}", "Uninstall the one that is not for torch's CUDA.")),
    Check("RDMA", the_machine, Case(NOTE, lambda it: not it.rdma, "no devices: between nodes tokens travel over TCP")),
    Check("RDMA", lambda info: info.rdma,
        Case(WARNING, lambda it: it.state != "ACTIVE", "{it.device} port {it.port} is {it.state}",
             f"Mend the link, or leave it out: {env.RDMA_DEVICES.name}=^{{it.device}}"),
        Case(WARNING, lambda it: it.link_layer == "Ethernet" and not it.has_address,
             "{it.device} port {it.port} has no address (GID), which RoCE needs",
             "Give its network interface an address; in containers, use the host's network."),
        Case(OK, always, "{it.device} port {it.port}: {it.link_layer}, {it.rate}")),
    Check("GPUDirect RDMA", nvidia,
        Case(NOTE, lambda it: it.rdma and not it.host.gpu_direct,
             "no nvidia_peermem: NCCL needs DMA-BUF, or copies by way of the host", "modprobe nvidia_peermem")),
    Check("host name", the_machine,
        Case(OK, lambda it: it.environment.get("GLOO_SOCKET_IFNAME"),
             "{it.host.name}; gloo uses {it.environment[GLOO_SOCKET_IFNAME]} (GLOO_SOCKET_IFNAME)"),
        Case(NOTE, lambda it: not it.host.addresses, "{it.host.name} has no address", INTERFACE),
        Case(NOTE, lambda it: all(address.startswith(LOOPBACK) for address in it.host.addresses),
             "{it.host.name} is {it.host.addresses:listed}, which other hosts cannot reach", INTERFACE),
        Case(OK, always, "{it.host.name}: {it.host.addresses:listed}")),
)  # fmt: skip
