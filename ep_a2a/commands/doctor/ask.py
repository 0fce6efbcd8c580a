"""Prints what a library says of itself. Runs as a program of its own, since a library may crash or hang.

    ask.py torch                          fields of machine.Torch
    ask.py triton                         fields of machine.Imported, and where its cache is
    ask.py driver                         fields of machine.Driver, from libcuda itself
    ask.py backend FOLDER BACKEND SIZES   fields of machine.Backend

Each line of facts is MARK and a Python dictionary; the last one has `problem` or `problems`. FOLDER is the one that the
package ep_a2a lies in, SIZES a dictionary in JSON. What a backend's manager says is printed before its library is
imported, which may hang.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Facts = dict[str, Any]

MARK = "ep_a2a_facts:"
# CUdevice_attribute and CUdevice_P2PAttribute of cuda.h.
CAPABILITY_MAJOR, CAPABILITY_MINOR, NUM_SMS = 75, 76, 16
P2P_ACCESS, P2P_NATIVE_ATOMICS = 2, 3
NAME_BYTES = 256
EXPERTS_PER_RANK = 32
TOKENS = 128
"""Tokens per rank where the request names none: as many as every backend takes."""


def _imported(name: str) -> tuple[Any, Facts]:
    """Returns a package and its version; None with `problem` where it is absent or its import fails."""
    try:
        package = importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == name
        return None, {"version": None, "problem": ""} if is_absent else {"problem": _text(error)}
    if not hasattr(package, "__version__"):
        return None, {"problem": f"the folder {list(package.__path__)} stands in its place"}
    return package, {"version": str(package.__version__), "problem": ""}


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def torch_facts() -> Iterator[Facts]:
    """What torch says."""
    torch, found = _imported("torch")
    if torch is not None:
        found |= {"cuda_build": torch.version.cuda, "hip_build": torch.version.hip}
        if torch.version.cuda or torch.version.hip:
            found |= _gpus(torch)
    yield found


def _gpus(torch: Any) -> Facts:
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # Unlike device_count, it makes a context: a driver that only half works fails here.
            torch.cuda.init()
        except Exception as error:  # noqa: BLE001
            said = [str(error)]
        count = 0 if said else torch.cuda.device_count()
    said += [str(each.message) for each in caught]
    problem = "; ".join(text.strip().splitlines()[0] for text in said if text.strip())
    return {"num_gpus": count, "gpu_problem": "" if count else problem}


def triton_facts() -> Iterator[Facts]:
    """What Triton says."""
    triton, found = _imported("triton")
    knobs = getattr(triton, "knobs", None)
    yield {**found, "cache": str(knobs.cache.dir) if knobs else ""}


def driver_facts() -> Iterator[Facts]:
    """What libcuda says, without torch."""
    try:
        yield {"problem": "", **_cuda_facts(ctypes.CDLL("libcuda.so.1"))}
    except OSError as error:
        yield {"problem": str(error)}


def _cuda_facts(library: ctypes.CDLL) -> Facts:
    def call(name: str, *args: Any) -> None:
        if code := getattr(library, name)(*args):
            text = ctypes.c_char_p()
            library.cuGetErrorString(code, ctypes.byref(text))
            raise OSError(f"{name}: error {code}, {text.value.decode() if text.value else 'no text'}")

    def integer(name: str, *args: Any) -> int:
        value = ctypes.c_int(0)
        call(name, ctypes.byref(value), *args)
        return value.value

    def gpu(device: int) -> Facts:
        name, num_bytes = ctypes.create_string_buffer(NAME_BYTES), ctypes.c_size_t(0)
        call("cuDeviceGetName", name, NAME_BYTES, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(num_bytes), device)
        attributes = (CAPABILITY_MAJOR, CAPABILITY_MINOR, NUM_SMS)
        *capability, num_sms = (integer("cuDeviceGetAttribute", each, device) for each in attributes)
        return {
            "name": name.value.decode(),
            "capability": tuple(capability),
            "num_sms": num_sms,
            "total_bytes": num_bytes.value,
        }

    def reach(attribute: int, a: int) -> tuple[bool, ...]:
        return tuple(a == b or bool(integer("cuDeviceGetP2PAttribute", attribute, a, b)) for b in devices)

    call("cuInit", 0)
    version = integer("cuDriverGetVersion")
    devices = [integer("cuDeviceGet", index) for index in range(integer("cuDeviceGetCount"))]
    return {
        "cuda": (version // 1000, version % 1000 // 10),
        "gpus": tuple(gpu(device) for device in devices),
        "access": tuple(reach(P2P_ACCESS, device) for device in devices),
        "atomics": tuple(reach(P2P_NATIVE_ATOMICS, device) for device in devices),
    }


def backend_facts(folder: str, name: str, sizes: str) -> Iterator[Facts]:
    """Yield what a backend's manager says of a request, then why the backend cannot be used here.

    Args:
        folder: where the package ep_a2a lies. name: of the backend.
        sizes: `ranks_per_node`, and `hidden`, `max_tokens` and `quant` where the request names them.
    """
    try:
        # The same package as in the process that asks, whatever the import path has.
        sys.path.insert(0, folder)
        importlib.import_module("ep_a2a")
        sys.path.pop(0)
        import torch

        from ep_a2a.managers.capabilities import problems
        from ep_a2a.managers.registry import manager_type

        manager = manager_type(name)
        if manager is None:
            raise LookupError("it has no manager class")
        yield request_facts(manager, **json.loads(sizes))
        yield {"problems": problems(manager, "cuda" if torch.cuda.is_available() else "cpu")}
    except BaseException as error:  # noqa: BLE001 - whatever a broken torch raises is the answer
        yield {"problems": (_text(error),)}


def request_facts(manager: Any, ranks_per_node: list[int], **sizes: Any) -> Facts:
    """Returns what a manager says of a request: its kernel, why it refuses sizes, the bytes that ep_a2a takes.

    Args:
        manager: the backend's class.
        ranks_per_node: ranks of each node.
        sizes: as options of `ep-a2a plan`; for those that are not named it gets some that every backend takes.
    """
    from ep_a2a.commands.options import OPTIONS_OF_FIELDS
    from ep_a2a.commands.plan.command import plan_op
    from ep_a2a.config.file import DEFAULT_BACKEND
    from ep_a2a.errors import EpA2AError

    num_nodes, num_ranks = len(ranks_per_node), sum(ranks_per_node)
    kernel, reason = manager.kernel_for(num_nodes, sizes.get("max_tokens"))
    found: Facts = {"kernel": kernel, "kernel_reason": reason}
    others = {"experts": EXPERTS_PER_RANK * num_ranks, "layout": manager.capabilities.layouts[0]}
    try:
        plan, _ = plan_op(ranks=num_ranks, **{"max_tokens": TOKENS, **others, **sizes})
        refusal = manager.capabilities.refusal(manager.backend, plan.config, num_nodes)
    except EpA2AError as error:
        # The reader knows the field as an option.
        option = OPTIONS_OF_FIELDS.get(error.field or "", ("",))[0].replace("_", "-")
        error.field, error.remedy = f"--{option}" if option else error.field, "Correct the option."
        refusal = error
    else:
        if manager.backend == DEFAULT_BACKEND and num_nodes == 1 and "max_tokens" in sizes:
            found["needed_bytes"] = plan.bytes_by_rank[0]
    if refusal is not None:
        found |= {"refusal": f"expected {refusal.expected}; got {refusal.got}", "remedy": refusal.remedy}
    return found


PROBES: dict[str, Callable[..., Iterator[Facts]]] = {
    "torch": torch_facts,
    "triton": triton_facts,
    "driver": driver_facts,
    "backend": backend_facts,
}

if __name__ == "__main__":
    for facts in PROBES[sys.argv[1]](*sys.argv[2:]):
        sys.stdout.write(f"\n{MARK}{facts!r}\n")
        sys.stdout.flush()
