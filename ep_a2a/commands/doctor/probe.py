"""Describes this machine as a Machine, without judging it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ep_a2a
from ep_a2a import env
from ep_a2a.commands.doctor import ask
from ep_a2a.commands.doctor.checks_machine import LIBRARIES, NEEDED_PACKAGES
from ep_a2a.commands.doctor.choice import stands_on_library
from ep_a2a.commands.doctor.machine import (
    Atom,
    Backend,
    Driver,
    Folder,
    Gpu,
    Host,
    Installation,
    Machine,
    RdmaPort,
    Request,
    Sharing,
    Torch,
    Triton,
    Vllm,
)
from ep_a2a.commands.programs import command_output, package_version
from ep_a2a.errors import EnvironmentVariableError, UnsupportedError
from ep_a2a.integrations.vllm import support
from ep_a2a.integrations.vllm.signatures import read_signatures
from ep_a2a.managers.capabilities import Capabilities
from ep_a2a.path_security import why_unsafe

PACKAGE = Path(ep_a2a.__file__).parent
ASK_SECS = 120.0
"""Seconds that a program may take which imports libraries: the first import of torch from a network drive is slow."""
OPTIONAL_PACKAGES = (
    "matplotlib",
    "cuda-bindings",
    "nvshmem4py-cu12",
    "nvshmem4py-cu13",
    "flashinfer-python",
    "amd-mori",
)
ATOM_LAYERS = Path("model_ops", "moe.py")
INFINIBAND = Path("/sys/class/infiniband")
UNSET_ADDRESS = "0000:0000:0000:0000:0000:0000:0000:0000"
GPU_QUERY = ("name", "driver_version", "memory.total", "memory.free", "mig.mode.current", "compute_mode")


def find_machine(ask_secs: float = ASK_SECS, backend: str = "") -> Machine:
    """Returns the description of the machine that this process runs on.

    Args:
        ask_secs: seconds that a library may take to import.
        backend: name of the requested backend, "" for none.
    """
    with ThreadPoolExecutor() as asking:
        found_backend = asking.submit(find_backend, backend, ask_secs)
        torch, triton, driver = asking.map(lambda name: ask_library(name, ask_secs), ("torch", "triton", "driver"))
    # A program that crashes leaves "?" for a version; nvidia-smi knows the driver's.
    gpus = tuple(Gpu(**gpu) for gpu in driver.get("gpus", ()))
    return Machine(
        installation=find_installation(),
        torch=Torch(**torch),
        triton=Triton(**triton),
        driver=add_nvidia_smi(Driver(**{**driver, "version": None, "gpus": gpus})),
        sharing=find_sharing(ask_secs) if gpus else Sharing(),
        host=find_host(triton.get("cache_directory", "")),
        rdma=find_rdma_ports(),
        vllm=find_vllm(),
        atom=find_atom(),
        backend=found_backend.result(),
        environment=env.variables_for_doctor(),
        variable_problems=find_variable_problems(),
    )


# --- programs of their own ---


def ask_library(name: str, timeout_secs: float, *arguments: str) -> dict[str, Any]:
    """Returns the facts that ask.py prints; `problem` says why the program ended before it had printed all."""
    # -P: the folder of ask.py must not be on the import path, where its modules could stand for others.
    flags = ["-P"] + ["-S"] * bool(sys.flags.no_site) + ["-E"] * bool(sys.flags.ignore_environment)
    command = [sys.executable, *flags, ask.__file__, name, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout_secs, check=False)
        printed, problem = done.stdout, _end_of(done)
    except subprocess.TimeoutExpired as late:
        printed, problem = late.stdout or b"", f"it had not answered within {timeout_secs:g} s"
    facts = {"version": "?"}
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith(ask.MARK):
            facts |= ast.literal_eval(line.removeprefix(ask.MARK))
    return {"problem": problem, **facts}


def _end_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Returns how a program ended, and the last line that it wrote."""
    code, names = done.returncode, {number.value: number.name for number in signal.Signals}
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal {-code}')}"
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return f"the process {how}: {lines[-1] if lines else 'nothing on stderr'}"


def find_sharing(timeout_secs: float = ASK_SECS) -> Sharing:
    """Returns how ranks would share a GPU of this machine; unknown where torch does not import."""
    found = ask_library("sharing", timeout_secs, str(PACKAGE.parent))
    return Sharing(found.get("way", ""), found.get("at_once", False))


def find_backend(name: str, timeout_secs: float = ASK_SECS) -> Backend:
    """Describes a backend from what its manager declares and what its library says."""
    if not stands_on_library(name):
        return Backend(name)
    found = ask_library("backend", timeout_secs, str(PACKAGE.parent), name)
    if "capabilities" not in found:
        return Backend(name, declaration_problem=found.get("declaration_problem") or found["problem"])
    return Backend(name, **{**found, "capabilities": Capabilities(**found["capabilities"])})


def plan_bytes(request: Request, num_ranks: int) -> int | None:
    """Returns the bytes of an op on each rank, as `ep-a2a plan` says; None where it fails or refuses the sizes."""
    options = {
        "ranks": num_ranks,
        "max-tokens": request.max_tokens,
        "hidden": request.hidden_dim,
        "quant": request.quant,
    }
    named = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    # -P: `python -m` would put the current folder on the import path, and run what lies there
    command = [sys.executable, "-P", "-m", "ep_a2a.cli", "plan", "--json", *named]
    printed = command_output(*command, timeout_secs=ASK_SECS)
    return int(json.loads(printed)["bytes_per_gpu"]["total"]) if printed else None


def add_nvidia_smi(driver: Driver) -> Driver:
    """Returns the description with what nvidia-smi adds; unchanged where there is no nvidia-smi."""
    version, gpus = read_query(
        command_output("nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits")
    )
    if not gpus:
        return driver
    links = read_links(command_output("nvidia-smi", "topo", "-m"))
    seen = driver.gpus or gpus
    # nvidia-smi numbers all GPUs of the host, CUDA the visible ones: the numbers match only where the counts do.
    if len(seen) == len(gpus):
        seen = tuple(
            replace(one, free_bytes=other.free_bytes, mig=other.mig, compute_mode=other.compute_mode)
            for one, other in zip(seen, gpus)
        )
    return replace(driver, version=version, gpus=seen, num_gpus_of_host=len(gpus), links=links)


def read_query(text: str) -> tuple[str, tuple[Gpu, ...]]:
    """Returns the driver's version and the GPUs in the lines of `nvidia-smi --query-gpu`; "" and () without one."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [line for line in lines if len(line) == len(GPU_QUERY)]
    gpus = []
    for name, _, *sizes, mig, compute_mode in rows:
        total, free = (int(size) << 20 if size.isdecimal() else None for size in sizes)
        gpus.append(Gpu(name, None, None, total, free, mig == "Enabled", compute_mode))
    return rows[0][1] if rows else "", tuple(gpus)


def read_links(text: str) -> tuple[tuple[str, ...], ...]:
    """Returns the matrix of `nvidia-smi topo -m` among GPUs; "X" is a GPU itself."""
    underline = re.compile(r"\x1b\[\d*m")
    lines = [[cell.strip() for cell in underline.sub("", line).split("\t")] for line in text.splitlines()]
    header = next((line for line in lines if "GPU0" in line), [])
    columns = [place for place, name in enumerate(header) if re.fullmatch(r"GPU\d+", name)]
    rows = [line for line in lines if re.fullmatch(r"GPU\d+", line[0]) and len(line) > max(columns, default=0)]
    return tuple(tuple(row[place] for place in columns) for row in rows)


# --- the operating system ---


def find_host(triton_cache: str) -> Host:
    """Describes the host.

    Args:
        triton_cache: where Triton keeps compiled kernels; "" where that is not known.
    """
    import resource

    cache = triton_cache or env.other_variable("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    limit, name = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], socket.gethostname()
    compilers = filter(None, (env.other_variable("CC"), "cc", "gcc", "clang"))
    addresses = set()
    with contextlib.suppress(OSError):
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)}
    modules = ("nvidia_peermem", "nv_peer_mem")
    return Host(
        python=sys.version_info[:3],
        system=platform.system(),
        locked_memory_bytes=None if limit == resource.RLIM_INFINITY else limit,
        shared_memory=find_folder(Path("/dev/shm")),
        triton_cache=find_folder(Path(cache)),
        compiler=next(filter(None, map(shutil.which, compilers)), ""),
        python_header=Path(sysconfig.get_path("include"), "Python.h").exists(),
        name=name,
        addresses=tuple(sorted(addresses)),
        gpu_direct=next((module for module in modules if Path("/sys/module", module).exists()), ""),
    )


def find_folder(path: Path) -> Folder:
    """Describes a folder; for one that does not exist, whether it could be made."""
    there = next(place for place in (path, *path.parents) if place.exists())
    space, status = os.statvfs(there), there.stat()
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
    return tuple(_port(path) for path in sorted(root.glob("*/ports/*")))


def _port(path: Path) -> RdmaPort:
    def text(file: Path) -> str:
        # The kernel refuses to read an empty entry of an address table.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return file.read_text().strip()
        return ""

    # "4: ACTIVE"
    state = text(path / "state").rpartition(":")[2].strip() or "unknown"
    has_address = any(text(entry) not in ("", UNSET_ADDRESS) for entry in (path / "gids").glob("*"))
    device = path.parent.parent.name
    return RdmaPort(device, path.name, state, text(path / "link_layer"), text(path / "rate"), has_address)


# --- packages and variables ---


def find_installation() -> Installation:
    """Describes how this package is installed, and which others are."""
    plugins = {entry.name for entry in metadata.entry_points(group="vllm.general_plugins")}
    named = {name: package_version(name) for name in (*NEEDED_PACKAGES, *OPTIONAL_PACKAGES)}
    # Only a list of all packages shows two builds of one library.
    everything = ((each.metadata["Name"] or "", each.version) for each in metadata.distributions())
    named |= {name.lower(): version for name, version in everything if name.lower().startswith(LIBRARIES)}
    # Tables lie inside of an installed package, beside that of a checkout.
    tables = sorted(PACKAGE.glob("configs/sm_*.json")) or sorted(PACKAGE.parent.glob("configs/sm_*.json"))
    return Installation(
        version=ep_a2a.__version__,
        installed_version=package_version("ep-a2a"),
        vllm_entry_point="ep_a2a" in plugins,
        atom_entry_point="ep_a2a_atom" in plugins,
        packages={name: version for name, version in named.items() if version},
        tuned_tables=tuple(path.name for path in tables),
    )


def find_vllm() -> Vllm:
    """Describes the vLLM of this environment from its source, as the plugin reads it, without importing it."""
    folder = _folder("vllm")
    if folder is None:
        return Vllm()
    version, problem, differences = support.vllm_version(), "", list[str]()
    try:
        support.check_version()
        differences = support.differences(read_signatures(folder))
    except UnsupportedError as error:
        problem = f"{error.got} is not {error.expected}"
    except (OSError, SyntaxError) as error:
        problem = f"its source cannot be read: {error}"
    return Vllm(version, problem, tuple(differences))


def find_atom() -> Atom:
    """Describes the ATOM of this environment. Another package has its name as well, but not its layers."""
    folder, has_aiter = _folder("atom"), _folder("aiter") is not None
    has_atom = folder is not None and (folder / ATOM_LAYERS).is_file()
    return Atom(
        version=package_version("atom") or "?" if has_atom else None,
        aiter=package_version("amd-aiter") or package_version("aiter") or "?" if has_aiter else None,
    )


def _folder(package: str) -> Path | None:
    """Returns where a package lies, without importing it; None where there is none."""
    with contextlib.suppress(ImportError, ValueError):
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            return Path(spec.submodule_search_locations[0])
    return None


def find_variable_problems() -> dict[str, str]:
    """Returns, by name, why the text of a variable of this package cannot be used."""
    problems = {}
    for variable in env.VARIABLES:
        try:
            variable.get()
        except EnvironmentVariableError as error:
            problems[variable.name] = f"expected {error.expected}; got {error.got}"
    return problems
