"""Describes this machine as a Machine, without judging it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ep_a2a
from ep_a2a import env
from ep_a2a.commands.doctor import ask
from ep_a2a.commands.doctor.checks_machine import LIBRARIES
from ep_a2a.commands.doctor.machine import (
    Atom,
    Backend,
    Choice,
    Driver,
    Folder,
    Gpu,
    Host,
    Imported,
    Installation,
    Machine,
    RdmaPort,
    Request,
    Torch,
    Vllm,
)
from ep_a2a.commands.options import given, named_backend
from ep_a2a.commands.programs import command_output, package_version
from ep_a2a.errors import EnvironmentVariableError, EpA2AError, UnsupportedError
from ep_a2a.integrations.contract import folder_of
from ep_a2a.integrations.vllm import support
from ep_a2a.path_security import why_unsafe

PACKAGE = Path(ep_a2a.__file__).parent
ASK_SECS = 120.0
"""Seconds that a program may take which imports libraries: the first import of torch from a network drive is slow."""
CPU_RANKS = 4
NAMED_PACKAGES = ("numpy", "typer", "rich", "matplotlib", "cuda-bindings", "flashinfer-python", "amd-mori")
ATOM_LAYERS = Path("model_ops", "moe.py")
INFINIBAND = Path("/sys/class/infiniband")
UNSET_ADDRESS = "0000:0000:0000:0000:0000:0000:0000:0000"


def find_machine(ask_secs: float = ASK_SECS) -> Machine:
    """Returns the description of the machine that this process runs on.

    Args:
        ask_secs: seconds that a library may take to import.
    """
    with ThreadPoolExecutor() as asking:
        torch, triton, driver = asking.map(lambda name: ask_library(name, ask_secs), ("torch", "triton", "driver"))
    gpus = tuple(Gpu(**gpu) for gpu in driver.get("gpus", ()))
    triton_cache = triton.pop("cache", "")
    return Machine(
        installation=find_installation(),
        torch=Torch(**torch),
        triton=Imported(**triton),
        driver=add_nvidia_smi(Driver(**{**driver, "gpus": gpus})),
        host=find_host(triton_cache),
        rdma=find_rdma_ports(),
        vllm=find_vllm(),
        atom=find_atom(),
        environment=env.variables_for_doctor(),
        variable_problems=find_variable_problems(),
    )


def choose(request: Request, num_gpus: int) -> Choice:
    """Returns the backend of a request, by the rule of init_dist_env, and its ranks; the kernel is the backend's."""
    device, ranks = "cuda" if num_gpus else "cpu", request.ranks_per_node or (num_gpus or CPU_RANKS,)
    choice = Choice(device=device, ranks_per_node=ranks)
    try:
        name, reason = named_backend(request.backend, request.config_file)
    except EpA2AError as error:
        return replace(choice, problem=f"expected {error.expected}; got {error.got}", remedy=error.remedy)
    return replace(choice, backend=name, backend_reason=reason)


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
    facts: dict[str, Any] = {"problem": problem}
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith(ask.MARK):
            facts |= ast.literal_eval(line.removeprefix(ask.MARK))
    return facts


def _end_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Returns how a program ended, and the last line that it wrote."""
    code, names = done.returncode, {number.value: number.name for number in signal.Signals}
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal {-code}')}"
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return f"the process {how}: {lines[-1] if lines else 'nothing on stderr'}"


def find_backend(choice: Choice, request: Request, timeout_secs: float = ASK_SECS) -> Backend:
    """Describes the chosen backend from what its manager says of the request, and its library of itself."""
    if not choice.backend:
        return Backend()
    sizes = given({"hidden": request.hidden_dim, "max_tokens": request.max_tokens})
    asked = {"ranks_per_node": choice.ranks_per_node, "quant": request.quant, **sizes}
    found = ask_library("backend", timeout_secs, str(PACKAGE.parent), choice.backend, json.dumps(asked))
    problem = found.pop("problem")
    return Backend(choice.backend, **{"problems": (problem,), **found})


def add_nvidia_smi(driver: Driver) -> Driver:
    """Returns the description with what nvidia-smi adds; unchanged where there is no nvidia-smi."""
    query = "--query-gpu=driver_version,memory.free"
    rows = read_query(command_output("nvidia-smi", query, "--format=csv,noheader,nounits"))
    if not rows:
        return driver
    gpus = driver.gpus
    # nvidia-smi numbers all GPUs of the host, CUDA the visible ones: the numbers match only where the counts do.
    if len(gpus) == len(rows):
        gpus = tuple(replace(gpu, free_bytes=free_bytes) for gpu, (_, free_bytes) in zip(gpus, rows))
    return replace(driver, version=rows[0][0], gpus=gpus, num_gpus_of_host=len(rows))


def read_query(text: str) -> list[tuple[str, int | None]]:
    """Returns the driver's version and the free bytes of each GPU in the lines of `nvidia-smi --query-gpu`."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    pairs = [line for line in lines if len(line) == 2]
    return [(version, int(free) << 20 if free.isdecimal() else None) for version, free in pairs]


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
    return Host(
        python=platform.python_version(),
        system=platform.system(),
        locked_memory_bytes=None if limit == resource.RLIM_INFINITY else limit,
        shared_memory=find_folder(Path("/dev/shm")),
        triton_cache=find_folder(Path(cache), holds_code=True),
        compiler=next(filter(None, map(shutil.which, compilers)), ""),
        python_header=Path(sysconfig.get_path("include"), "Python.h").exists(),
        name=name,
        addresses=tuple(sorted(addresses)),
    )


def find_folder(path: Path, *, holds_code: bool = False) -> Folder:
    """Describes a folder; one that holds code need not exist, but code that lies there must be trusted and run."""
    there = next(place for place in (path, *path.parents) if place.exists())
    space, problem = os.statvfs(there), ""
    if there != path and not holds_code:
        problem = "does not exist"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = "cannot be written to"
    elif holds_code and space.f_flag & os.ST_NOEXEC:
        problem = "is on a disk mounted noexec"
    elif holds_code and (reason := why_unsafe(path)):
        problem = f"holds code that is not executed: {reason}"
    return Folder(str(path), problem, space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)


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
    # Only a list of all packages shows two builds of one library.
    names = {(each.metadata["Name"] or "").lower() for each in metadata.distributions()}
    return Installation(
        version=ep_a2a.__version__,
        installed_version=package_version("ep-a2a"),
        vllm_entry_point="ep_a2a" in plugins,
        atom_entry_point="ep_a2a_atom" in plugins,
        packages={
            name: package_version(name) or "?"
            for name in sorted(names)
            if name in NAMED_PACKAGES or name.startswith(LIBRARIES)
        },
    )


def find_vllm() -> Vllm:
    """Describes the vLLM of this environment from its source, as the plugin reads it, without importing it."""
    if folder_of("vllm") is None:
        return Vllm()
    version, problem = support.vllm_version(), ""
    try:
        problem = "; ".join(support.problems())
    except UnsupportedError as error:
        problem = f"not {error.expected}"
    except (OSError, SyntaxError) as error:
        problem = f"its source cannot be read: {error}"
    return Vllm(version, problem)


def find_atom() -> Atom:
    """Describes the ATOM of this environment. Another package has its name as well, but not its layers."""
    folder, has_aiter = folder_of("atom"), folder_of("aiter") is not None
    has_atom = folder is not None and (folder / ATOM_LAYERS).is_file()
    return Atom(
        version=package_version("atom") or "?" if has_atom else None,
        aiter=package_version("amd-aiter") or package_version("aiter") or "?" if has_aiter else None,
    )


def find_variable_problems() -> dict[str, str]:
    """Returns, by name, why the text of a variable of this package cannot be used."""
    problems = {}
    for variable in env.VARIABLES:
        try:
            variable.get()
        except EnvironmentVariableError as error:
            problems[variable.name] = f"expected {error.expected}; got {error.got}"
    return problems
