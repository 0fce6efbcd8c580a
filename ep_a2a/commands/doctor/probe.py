"""Find the facts of this machine, and what a request gets on it, without judging them.

Programs of their own (ask.py) ask libraries; PROBES find the rest in this process. Each returns facts by name of a
field of Machine.
"""

import ast
import contextlib
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
from ep_a2a.commands.doctor.machine import Choice, Gpu, Machine
from ep_a2a.commands.options import named_backend
from ep_a2a.commands.programs import command_output, package_version
from ep_a2a.errors import EnvironmentVariableError, EpA2AError, UnsupportedError
from ep_a2a.integrations.contract import folder_of
from ep_a2a.integrations.vllm import support
from ep_a2a.path_security import why_unsafe

ASK_SECS = 120.0
"""Seconds that a program may take which imports libraries: the first import of torch from a network drive is slow."""
CPU_RANKS = 4
SHARED_MEMORY = Path("/dev/shm")


def find_machine() -> Machine:
    """Return the description of this machine."""
    with ThreadPoolExecutor() as asking:
        torch, triton = asking.map(ask_library, ("torch", "triton"))
    facts = torch | triton | find_free_memory([Gpu(*gpu) for gpu in torch.get("gpus", ())])
    if cache := triton.get("triton_cache"):
        facts["triton_cache_problem"] = folder_problem(Path(cache), holds_code=True)
    for probe in PROBES:
        facts |= probe()
    return Machine(**facts)


def choose(num_gpus: int, backend: str | None, config: str | None, ranks: tuple[int, ...] | None) -> Choice:
    """Return the backend of a request, by the rule of init_dist_env, and its ranks.

    Args:
        num_gpus: that torch sees.
        backend: None takes the config file's, then EP_A2A_BACKEND's, then the default.
        config: a TOML file; None takes EP_A2A_CONFIG.
        ranks: of each node; None is one node with a rank per GPU, or CPU_RANKS without one.
    """
    ranks = ranks or (num_gpus or CPU_RANKS,)
    choice = Choice(device="cuda" if num_gpus else "cpu", ranks_per_node=ranks)
    try:
        name, reason = named_backend(backend, config)
    except EpA2AError as error:
        return replace(choice, refusal=f"expected {error.expected}; got {error.got}", remedy=error.remedy)
    return replace(choice, backend=name, backend_reason=reason)


# --- programs of their own ---


def ask_library(name: str, *arguments: str, timeout_secs: float = ASK_SECS) -> dict[str, Any]:
    """Return the facts that ask.py prints; `{name}_problem` is why the program ended before it had printed all."""
    # -P: the folder of ask.py must not be on the import path, where its modules could stand for others.
    flags = ["-P"] + ["-S"] * bool(sys.flags.no_site) + ["-E"] * bool(sys.flags.ignore_environment)
    command = [sys.executable, *flags, ask.__file__, name, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout_secs, check=False)
        printed, problem = done.stdout, _end_of(done)
    except subprocess.TimeoutExpired as late:
        printed, problem = late.stdout or b"", f"it had not answered within {timeout_secs:g} s"
    facts: dict[str, Any] = {f"{name}_problem": problem}
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith(ask.MARK):
            facts |= ast.literal_eval(line.removeprefix(ask.MARK))
    return facts


def _end_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return how a program ended, and the last line that it wrote."""
    code, names = done.returncode, {number.value: number.name for number in signal.Signals}
    how = f"ended with exit code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal {-code}')}"
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return f"the process {how}: {lines[-1] if lines else 'nothing on stderr'}"


def ask_backend(choice: Choice) -> Choice:
    """Add what the manager of the chosen backend says of the request, and its library of itself."""
    if not choice.backend:
        return choice
    ranks = ",".join(map(str, choice.ranks_per_node))
    found = ask_library("backend", str(Path(ep_a2a.__file__).parents[1]), choice.backend, ranks)
    problem = found.pop("backend_problem")
    return replace(choice, **{"problems": (problem,), **found})


def find_free_memory(gpus: list[Gpu]) -> dict[str, Any]:
    """Find what nvidia-smi adds to the GPUs of torch; the same GPUs where there is no nvidia-smi."""
    query = "--query-gpu=driver_version,memory.free"
    rows = read_query(command_output("nvidia-smi", query, "--format=csv,noheader,nounits"))
    # nvidia-smi numbers all GPUs of the host, CUDA the visible ones: the numbers match only where the counts do.
    if len(gpus) == len(rows):
        gpus = [replace(gpu, free_bytes=free_bytes) for gpu, (_, free_bytes) in zip(gpus, rows)]
    return {"gpus": tuple(gpus), "num_gpus_of_host": len(rows), "driver": rows[0][0] if rows else None}


def read_query(text: str) -> list[tuple[str, int | None]]:
    """Return the driver's version and the free bytes of each GPU in the lines of `nvidia-smi --query-gpu`."""
    pairs = [cells for line in text.splitlines() if len(cells := line.split(", ")) == 2]
    return [(version, int(free) << 20 if free.isdecimal() else None) for version, free in pairs]


# --- this process ---


def find_host() -> dict[str, Any]:
    """Describe the operating system."""
    import resource

    limit, name = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], socket.gethostname()
    compilers = filter(None, (env.other_variable("CC"), "cc", "gcc", "clang"))
    space = shutil.disk_usage(SHARED_MEMORY if SHARED_MEMORY.exists() else "/")
    addresses = set()
    with contextlib.suppress(OSError):
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)}
    return {
        "system": platform.system(),
        "python": platform.python_version(),
        "compiler": next(filter(None, map(shutil.which, compilers)), ""),
        "python_header": Path(sysconfig.get_path("include"), "Python.h").exists(),
        "shared_memory_problem": folder_problem(SHARED_MEMORY),
        "shared_memory_bytes": space.total,
        "shared_memory_free_bytes": space.free,
        "locked_memory_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "host_name": name,
        "addresses": tuple(sorted(addresses)),
        "rdma": tuple(sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))),
    }


def folder_problem(path: Path, *, holds_code: bool = False) -> str:
    """Return why a folder cannot be used, else ""; one that holds code need not exist, but must be trusted and run."""
    there = next(place for place in (path, *path.parents) if place.exists())
    if there != path and not holds_code:
        return "does not exist"
    if not os.access(there, os.W_OK | os.X_OK):
        return "cannot be written to"
    if holds_code and os.statvfs(there).f_flag & os.ST_NOEXEC:
        return "is on a disk mounted noexec"
    reason = why_unsafe(path) if holds_code else ""
    return f"holds code that is not executed: {reason}" if reason else ""


def find_installation() -> dict[str, Any]:
    """Describe how this package is installed."""
    return {
        "version": ep_a2a.__version__,
        "installed_version": package_version("ep-a2a"),
        "vllm_entry_point": bool(metadata.entry_points(group="vllm.general_plugins", name="ep_a2a")),
    }


def find_vllm() -> dict[str, Any]:
    """Describe the vLLM of this environment from its source, as the plugin reads it, without importing it."""
    if folder_of("vllm") is None:
        return {}
    try:
        problem = "; ".join(support.problems())
    except UnsupportedError as error:
        problem = f"not {error.expected}"
    except (OSError, SyntaxError) as error:
        problem = f"its source cannot be read: {error}"
    return {"vllm": support.vllm_version(), "vllm_problem": problem}


def find_variables() -> dict[str, Any]:
    """Return the set variables, and by name why the text of one of this package cannot be used."""
    problems = {}
    for variable in env.VARIABLES:
        try:
            variable.get()
        except EnvironmentVariableError as error:
            problems[variable.name] = f"expected {error.expected}; got {error.got}"
    return {"environment": env.variables_for_doctor(), "variable_problems": problems}


PROBES = (find_installation, find_variables, find_vllm, find_host)
