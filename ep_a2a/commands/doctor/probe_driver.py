"""Prints what the CUDA driver library says, as JSON. Runs as a program, since a broken driver crashes or hangs.

The facts are fields of system_info.Driver. The program calls libcuda directly, so that torch need not work.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

LIBRARY = "libcuda.so.1"
# CUdevice_attribute and CUdevice_P2PAttribute of cuda.h.
NUM_SMS, COMPUTE_MODE, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 20, 75, 76
P2P_ACCESS, P2P_NATIVE_ATOMICS = 2, 3
COMPUTE_MODES = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}
NAME_BYTES = 256


class _FailedError(Exception):
    pass


class Library:
    """libcuda, with its errors as exceptions."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def call(self, name: str, *args: Any) -> None:
        """Calls a function that returns a CUresult."""
        code = getattr(self._library, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            words = text.value.decode() if text.value else "no text"
            raise _FailedError(f"{name}: error {code}, {words}")

    def integer(self, name: str, *args: Any) -> int:
        """Returns the int that a function writes to its first argument."""
        value = ctypes.c_int(0)
        self.call(name, ctypes.byref(value), *args)
        return value.value


def facts() -> dict[str, Any]:
    """Returns what the driver says; with `problem` where there is none or it cannot be used."""
    try:
        library = Library()
    except OSError as error:
        return {"problem": str(error)}
    try:
        library.call("cuInit", 0)
        version = library.integer("cuDriverGetVersion")
        devices = [library.integer("cuDeviceGet", index) for index in range(library.integer("cuDeviceGetCount"))]
        return {
            "cuda": [version // 1000, version % 1000 // 10],
            "gpus": [_gpu(library, device) for device in devices],
            "access": _pairs(library, devices, P2P_ACCESS),
            "atomics": _pairs(library, devices, P2P_NATIVE_ATOMICS),
        }
    except _FailedError as error:
        return {"problem": str(error)}


def _gpu(library: Library, device: int) -> dict[str, Any]:
    name = ctypes.create_string_buffer(NAME_BYTES)
    library.call("cuDeviceGetName", name, NAME_BYTES, device)
    num_bytes = ctypes.c_size_t(0)
    library.call("cuDeviceTotalMem_v2", ctypes.byref(num_bytes), device)
    major, minor, num_sms, mode = (
        library.integer("cuDeviceGetAttribute", attribute, device)
        for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR, NUM_SMS, COMPUTE_MODE)
    )
    return {
        "name": name.value.decode(),
        "capability": [major, minor],
        "num_sms": num_sms,
        "total_bytes": num_bytes.value,
        "compute_mode": COMPUTE_MODES.get(mode, str(mode)),
    }


def _pairs(library: Library, devices: list[int], attribute: int) -> list[list[bool]]:
    return [
        [one == other or bool(library.integer("cuDeviceGetP2PAttribute", attribute, one, other)) for other in devices]
        for one in devices
    ]


if __name__ == "__main__":
    sys.stdout.write(f"\nep_a2a_facts:{json.dumps(facts())}\n")
