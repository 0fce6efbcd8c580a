"""Prints what torch says, as one line of JSON: fields of system_info.Torch.

Runs as a program, since `import torch` may fail, crash or hang.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def facts() -> dict[str, Any]:
    """Returns what torch says; with `problem` where it cannot be imported."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return {} if error.name == "torch" else {"version": "?", "problem": f"{type(error).__name__}: {error}"}
    except BaseException as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        return {"version": "?", "problem": f"{type(error).__name__}: {error}"}
    if not hasattr(torch, "__version__"):
        return {"version": "?", "problem": f"the folder {list(torch.__path__)} stands in its place"}
    return {
        "version": str(torch.__version__),
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        **_gpus(torch),
        **_distributed(torch),
    }


def _gpus(torch: Any) -> dict[str, Any]:
    if not (torch.version.cuda or torch.version.hip):
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # Unlike device_count, it makes a context: a driver that only half works fails here.
            torch.cuda.init()
            count, problem = torch.cuda.device_count(), ""
        except Exception as error:  # noqa: BLE001
            count, problem = 0, str(error).strip().splitlines()[0]
    said = [str(warning.message).strip().splitlines()[0] for warning in caught]
    return {
        "num_gpus": count,
        "gpu_problem": "; ".join(filter(None, [problem, *said])) if count == 0 else "",
        "architectures": list(torch.cuda.get_arch_list()) if count else [],
    }


def _distributed(torch: Any) -> dict[str, Any]:
    dist = torch.distributed
    if not dist.is_available():
        return {}
    found: dict[str, Any] = {"has_gloo": dist.is_gloo_available()}
    try:
        import torch.distributed._symmetric_memory as symmetric

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
    """Version of the NCCL library that this process has loaded: that of torch's headers need not be it."""
    import ctypes
    from pathlib import Path

    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl.so" in line}
    for path in paths:
        number = ctypes.c_int(0)
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) == 0:
            major, rest = divmod(number.value, 10000)
            return f"{major}.{rest // 100}.{rest % 100}"
    return ""


if __name__ == "__main__":
    sys.stdout.write(f"\nep_a2a_facts:{json.dumps(facts())}\n")
