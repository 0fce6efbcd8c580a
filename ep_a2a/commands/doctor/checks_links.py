"""Checks of how ranks reach each other: memory of other GPUs, shared memory, libraries, networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a import env
from ep_a2a.commands.doctor.checks_software import version_numbers
from ep_a2a.commands.doctor.diagnostic import Finding, error, note, ok, warning

if TYPE_CHECKING:
    from ep_a2a.commands.doctor.system_info import Machine

MIB = 1 << 20
SMALL_SHARED_MEMORY_BYTES = 1 << 30
"""Docker gives 64 MiB unless told otherwise; NCCL and vLLM want much more than that."""
STICKY = 0o1000
LITTLE_LOCKED_BYTES = 1 << 30
LOOPBACK = ("127.", "::1")
NCCL_TYPES = ("nvidia-nccl-", "nvidia-nvshmem-")


def check_gpu_links(machine: Machine) -> list[Finding]:
    """How the GPUs of this host are connected, and which reach each other."""
    driver = machine.driver
    num_gpus = len(driver.gpus)
    if num_gpus < 2:
        return []
    findings = []
    if driver.links:
        pairs = [driver.links[a][b] for a in range(len(driver.links)) for b in range(a)]
        kinds = ", ".join(f"{pairs.count(kind)} pairs by {kind}" for kind in sorted(set(pairs)))
        findings.append(ok("links", kinds))
    if not driver.access:
        return [*findings, note("peer access", "not known: the driver library could not be asked")]
    # That no pair of these may be used is judged where it is known which backend will use them (choice.py).
    for what, matrix in (("peer access", driver.access), ("native atomics", driver.atomics)):
        missing = missing_pairs(matrix)
        if missing:
            findings.append(note(what, f"not between GPUs {_pairs(missing)}"))
        else:
            findings.append(ok(what, f"between all {num_gpus} GPUs"))
    return findings


def missing_pairs(matrix: tuple[tuple[bool, ...], ...]) -> list[tuple[int, int]]:
    """Pairs of which one does not reach the other."""
    return [(a, b) for b in range(len(matrix)) for a in range(b) if not (matrix[a][b] and matrix[b][a])]


def check_symmetric_memory(machine: Machine) -> list[Finding]:
    """Ways to map memory of other ranks on GPUs."""
    torch = machine.torch
    if not machine.has_gpus or torch.version is None or torch.problem or torch.hip_build:
        return []
    if not torch.has_symmetric_memory:
        return [error("symmetric memory", "not in this torch", "Install a torch of 2.11 or later with CUDA.")]
    findings = [ok("symmetric memory", "torch's")]
    if "cuda-bindings" not in machine.installation.packages:
        findings.append(
            note("CUDA IPC", "without cuda-bindings: ranks that all call their GPU cuda:0 (Ray) cannot share memory",
                 "pip install cuda-bindings")
        )  # fmt: skip
    return findings


def check_nccl(machine: Machine) -> list[Finding]:
    """Whether the NCCL that is loaded is the one that torch was built with."""
    torch = machine.torch
    if torch.cuda_build is None or torch.problem:
        return []
    if torch.nccl is None:
        return [error("NCCL", "not in this torch", "Install a torch with CUDA and distributed support.")]
    findings = []
    if torch.nccl_built and version_numbers(torch.nccl) < version_numbers(torch.nccl_built):
        findings.append(
            error("NCCL", f"{torch.nccl} is loaded, torch was built with {torch.nccl_built}",
                  "Unset LD_PRELOAD, LD_LIBRARY_PATH and VLLM_NCCL_SO_PATH, or install the version that torch names.")
        )  # fmt: skip
    elif torch.nccl_built and torch.nccl != torch.nccl_built:
        findings.append(note("NCCL", f"{torch.nccl}; torch was built with {torch.nccl_built}"))
    else:
        findings.append(ok("NCCL", torch.nccl))
    return findings


def check_duplicate_libraries(machine: Machine) -> list[Finding]:
    """Two packages that bring one library, for different CUDA versions: whichever is found first is loaded."""
    packages = machine.installation.packages
    findings = []
    for beginning in NCCL_TYPES:
        found = [f"{name} {version}" for name, version in sorted(packages.items()) if name.startswith(beginning)]
        if len(found) > 1:
            findings.append(
                warning("libraries", f"both {' and '.join(found)}", "Uninstall the one that is not for torch's CUDA.")
            )  # fmt: skip
    return findings


def check_nvshmem(machine: Machine) -> list[Finding]:
    """NVSHMEM, which carries tokens between nodes where it is asked for."""
    if not machine.has_gpus:
        return []
    found = "installed" if has_nvshmem(machine) else "no package nvidia-nvshmem"
    return [note("NVSHMEM", f"{found}; used with {env.RAIL.name}=nvshmem only")]


def has_nvshmem(machine: Machine) -> bool:
    """Whether a package brings its libraries."""
    return any(name.startswith("nvidia-nvshmem-") for name in machine.installation.packages)


def check_shared_memory(machine: Machine) -> list[Finding]:
    """/dev/shm: the memory of CPU ranks, the probe of nodes, NCCL's and vLLM's buffers."""
    folder = machine.host.shared_memory
    larger = "Enlarge it: --shm-size=16g or --ipc=host for containers, mount -o remount,size=16g /dev/shm for hosts."
    if not folder.exists or not folder.writable:
        what = "cannot be written to" if folder.exists else "does not exist"
        return [error("/dev/shm", what, "Mount a tmpfs there that all ranks of the host share (--ipc=host).")]
    sizes = f"{folder.free_bytes // MIB} of {folder.size_bytes // MIB} MiB free"
    findings = []
    if folder.mode & 0o002 and not folder.mode & STICKY:
        findings.append(
            error("/dev/shm", f"mode {folder.mode:o}: other users may remove and replace files", "chmod 1777 /dev/shm")
        )  # fmt: skip
    if folder.free_bytes < SMALL_SHARED_MEMORY_BYTES:
        findings.append(warning("/dev/shm", sizes, larger))
    return findings or [ok("/dev/shm", sizes)]


def check_locked_memory(machine: Machine) -> list[Finding]:
    """The limit of memory that may be pinned, which RDMA needs."""
    limit = machine.host.locked_memory_bytes
    if limit is None:
        return [ok("locked memory", "no limit")]
    text = f"at most {limit // 1024} KiB"
    if machine.rdma and limit < LITTLE_LOCKED_BYTES:
        return [warning("locked memory", f"{text}: too little to register memory for RDMA", "ulimit -l unlimited")]
    return [note("locked memory", f"{text}; enough without RDMA")]


def check_rdma(machine: Machine) -> list[Finding]:
    """RDMA devices, for nodes that exchange tokens over NCCL."""
    if not machine.rdma:
        return [note("RDMA", "no devices: between nodes tokens travel over TCP")]
    findings = []
    for port in machine.rdma:
        name = f"{port.device} port {port.port}"
        if port.state != "ACTIVE":
            findings.append(
                warning("RDMA", f"{name} is {port.state}",
                        f"Mend the link, or leave it out: EP_A2A_RDMA_DEVICES=^{port.device}")
            )  # fmt: skip
        elif port.link_layer == "Ethernet" and not port.has_address:
            findings.append(
                warning("RDMA", f"{name} has no address (GID), which RoCE needs",
                        "Give its network interface an address; in containers, use the host's network.")
            )  # fmt: skip
        else:
            findings.append(ok("RDMA", f"{name}: {port.link_layer}, {port.rate}"))
    if machine.has_gpus and not machine.torch.hip_build and not machine.host.gpu_direct:
        findings.append(
            note("GPUDirect RDMA", "no nvidia_peermem: NCCL needs DMA-BUF, or copies by way of the host",
                 "modprobe nvidia_peermem")
        )  # fmt: skip
    return findings


def check_host_name(machine: Machine) -> list[Finding]:
    """Whether other hosts can reach what this one's name stands for, which gloo gives them."""
    host = machine.host
    chosen = machine.environment.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return [ok("host name", f"{host.name}; gloo uses {chosen} (GLOO_SOCKET_IFNAME)")]
    remedy = "For several nodes set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that they share."
    if not host.addresses:
        return [note("host name", f"{host.name} has no address", remedy)]
    if all(address.startswith(LOOPBACK) for address in host.addresses):
        return [
            note("host name", f"{host.name} is {', '.join(host.addresses)}, which other hosts cannot reach", remedy)
        ]
    return [ok("host name", f"{host.name}: {', '.join(host.addresses)}")]


def _pairs(pairs: list[tuple[int, int]]) -> str:
    return ", ".join(f"{a} and {b}" for a, b in pairs)
