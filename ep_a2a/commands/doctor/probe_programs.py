"""Prints what a library says of itself, as one line of JSON. Runs as a program, since a library may crash or hang.

    probe_programs.py torch                         fields of system_info.Torch
    probe_programs.py triton                        fields of system_info.Triton
    probe_programs.py driver                        fields of system_info.Driver, from libcuda itself
    probe_programs.py declaration FOLDER BACKEND    fields of system_info.Backend that the backend's manager declares
    probe_programs.py library FOLDER BACKEND        the version of the backend's library, and its `problem`

FOLDER is the folder of the package ep_a2a. `declaration` does not import the library, so it works where that hangs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.managers.base import All2AllManagerBase
    from ep_a2a.managers.external.libraries import Library

MARK = "ep_a2a_facts:"
# CUdevice_attribute and CUdevice_P2PAttribute of cuda.h.
CAPABILITY_MAJOR, CAPABILITY_MINOR, NUM_SMS, COMPUTE_MODE = 75, 76, 16, 20
P2P_ACCESS, P2P_NATIVE_ATOMICS = 2, 3
COMPUTE_MODES = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}
NAME_BYTES = 256


def _imported(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns a package and its version; None with `problem` where its import fails, None and {} where it is absent."""
    try:
        package = importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == name
        return None, {} if is_absent else {"version": "?", "problem": f"{type(error).__name__}: {error}"}
    if not hasattr(package, "__version__"):
        return None, {"version": "?", "problem": f"the folder {list(package.__path__)} stands in its place"}
    return package, {"version": str(package.__version__)}


def torch_facts() -> dict[str, Any]:
    """Returns what torch says."""
    torch, found = _imported("torch")
    if torch is None:
        return found
    version = torch.version
    return {**found, "cuda_build": version.cuda, "hip_build": version.hip, **_gpus(torch), **_distributed(torch)}


def _gpus(torch: Any) -> dict[str, Any]:
    if not (torch.version.cuda or torch.version.hip):
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # Unlike device_count, it makes a context: a driver that only half works fails here.
            torch.cuda.init()
            count, said = torch.cuda.device_count(), []
        except Exception as error:  # noqa: BLE001
            count, said = 0, [str(error)]
    said = [text.strip().splitlines()[0] for text in (*said, *(str(each.message) for each in caught)) if text.strip()]
    return {
        "num_gpus": count,
        "gpu_problem": "; ".join(said) if count == 0 else "",
        "architectures": list(torch.cuda.get_arch_list()) if count else [],
    }


def _distributed(torch: Any) -> dict[str, Any]:
    dist = torch.distributed
    if not dist.is_available():
        return {}
    found: dict[str, Any] = {"has_gloo": dist.is_gloo_available()}
    try:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        found["has_symmetric_memory"] = True
        asks = getattr(symmetric, "is_nvshmem_available", None)
        found["has_nvshmem"] = bool(asks and asks())
    except Exception:  # noqa: BLE001 - a build without them
        found.setdefault("has_symmetric_memory", False)
    if dist.is_nccl_available() and torch.version.cuda:
        found["nccl_built"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["nccl"] = _loaded_nccl() or found["nccl_built"]
    return found


def _loaded_nccl() -> str:
    """Returns the version of the NCCL library that this process has loaded: torch's headers may be of another."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl.so" in line}
    for path in paths:
        number = ctypes.c_int(0)
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
            major, rest = divmod(number.value, 10000)
            return f"{major}.{rest // 100}.{rest % 100}"
    return ""


def triton_facts() -> dict[str, Any]:
    """Returns what Triton says."""
    triton, found = _imported("triton")
    knobs = getattr(triton, "knobs", None)
    return {**found, "cache_directory": str(knobs.cache.dir) if knobs else ""}


def driver_facts() -> dict[str, Any]:
    """Returns what libcuda says; with `problem` where there is none or it cannot be used. Needs no torch."""
    try:
        return _cuda_facts(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        return {"problem": str(error)}


def _cuda_facts(library: ctypes.CDLL) -> dict[str, Any]:
    def call(name: str, *args: Any) -> None:
        if code := getattr(library, name)(*args):
            text = ctypes.c_char_p()
            library.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name}: error {code}, {text.value.decode() if text.value else 'no text'}")

    def integer(name: str, *args: Any) -> int:
        value = ctypes.c_int(0)
        call(name, ctypes.byref(value), *args)
        return value.value

    def gpu(device: int) -> dict[str, Any]:
        name, num_bytes = ctypes.create_string_buffer(NAME_BYTES), ctypes.c_size_t(0)
        call("cuDeviceGetName", name, NAME_BYTES, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(num_bytes), device)
        attributes = (CAPABILITY_MAJOR, CAPABILITY_MINOR, NUM_SMS, COMPUTE_MODE)
        major, minor, num_sms, mode = (integer("cuDeviceGetAttribute", each, device) for each in attributes)
        return {
            "name": name.value.decode(),
            "capability": [major, minor],
            "num_sms": num_sms,
            "total_bytes": num_bytes.value,
            "compute_mode": COMPUTE_MODES.get(mode, str(mode)),
        }

    def pairs(attribute: int) -> list[list[bool]]:
        return [[a == b or bool(integer("cuDeviceGetP2PAttribute", attribute, a, b)) for b in devices] for a in devices]

    call("cuInit", 0)
    version = integer("cuDriverGetVersion")
    devices = [integer("cuDeviceGet", index) for index in range(integer("cuDeviceGetCount"))]
    return {
        "cuda": [version // 1000, version % 1000 // 10],
        "gpus": [gpu(device) for device in devices],
        "access": pairs(P2P_ACCESS),
        "atomics": pairs(P2P_NATIVE_ATOMICS),
    }


def declaration_facts(folder: str, name: str) -> dict[str, Any]:
    """Returns what a backend's manager declares; `problem` where it cannot be imported."""

    def declared(manager: type[All2AllManagerBase], library: Library) -> dict[str, Any]:
        return {
            "library": library.distribution,
            "install": library.install,
            "kernel": manager.kernel_for(1)[0],
            "kernel_between_nodes": manager.kernel_for(2)[0],
            "capabilities": dataclasses.asdict(manager.capabilities),
        }

    return _backend_facts(folder, name, declared)


def library_facts(folder: str, name: str) -> dict[str, Any]:
    """Returns the version of a backend's library, and why it cannot be used."""
    return _backend_facts(
        folder, name, lambda manager, library: {"version": library.version, "problem": library.problem() or ""}
    )


def sharing_facts(folder: str) -> dict[str, Any]:
    """Returns how ranks that share a GPU would get at it; `problem` where torch, which they need, does not import."""
    try:
        _import_package(folder)
        from ep_a2a.testing.mps import find_mps

        mps = find_mps()
    except BaseException as error:  # noqa: BLE001 - whatever a broken torch raises is the answer
        return {"problem": f"{type(error).__name__}: {error}"}
    return {"way": mps.value, "at_once": mps.at_once}


def _backend_facts(folder: str, name: str, facts: Any) -> dict[str, Any]:
    try:
        _import_package(folder)
        from ep_a2a.managers.registry import manager_type

        manager = manager_type(name)
        if manager is None or manager.library is None:
            return {"problem": "it declares no library"}
        found: dict[str, Any] = facts(manager, manager.library)
    except BaseException as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        return {"problem": f"{type(error).__name__}: {error}"}
    return found


def _import_package(folder: str) -> None:
    """Makes `import ep_a2a` give the package in `folder`, as in the process that asks, whatever the import path has."""
    spec = importlib.util.spec_from_file_location(
        "ep_a2a", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {folder}")
    module = sys.modules["ep_a2a"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": torch_facts,
    "triton": triton_facts,
    "driver": driver_facts,
    "declaration": declaration_facts,
    "library": library_facts,
    "sharing": sharing_facts,
}

if __name__ == "__main__":
    sys.stdout.write(f"\n{MARK}{json.dumps(PROBES[sys.argv[1]](*sys.argv[2:]))}\n")
