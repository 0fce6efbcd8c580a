"""Another user of the host who tries to read and write what ranks share; a program of its own.

    python tests/programs/intruder.py USER ADDRESS FOLDER PID...

It becomes user USER and prints as JSON which of its attempts worked: on FOLDER, on files in it that processes PID have
made for shared memory, and on the memory of these processes (at ADDRESS, unless that is 0).
"""

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PTRACE_ATTACH = 16
LIBC = ctypes.CDLL(None, use_errno=True)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def checked(result: int) -> int:
    """What a function of libc returned, or its error as an exception."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def opened(path: Path | str, flags: int) -> None:
    """Opens and closes a file."""
    os.close(os.open(path, flags))


def read_memory(process: int, address: int) -> None:
    """Reads a few bytes of another process by process_vm_readv."""
    buffer = ctypes.create_string_buffer(8)
    here, there = _Vector(ctypes.addressof(buffer), 8), _Vector(address, 8)
    checked(LIBC.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))


def attach(process: int) -> None:
    """Becomes the debugger of another process, and lets it go again."""
    checked(LIBC.ptrace(PTRACE_ATTACH, process, None, None))
    os.waitpid(process, 0)
    LIBC.ptrace(17, process, None, None)


def attempts_on(path: Path) -> dict[str, Callable[[], Any]]:
    """What may be tried on a file of shared memory; changes that would succeed are harmless or made for the test."""
    return {
        "read": lambda: opened(path, os.O_RDONLY),
        "write": lambda: opened(path, os.O_RDWR),
        "open up": lambda: os.chmod(path, 0o600),
        "rename": lambda: (os.rename(path, f"{path}x"), os.rename(f"{path}x", path)),
    }


def attempts_on_process(process: int, address: int) -> dict[str, Callable[[], Any]]:
    """What may be tried on a process that has shared memory mapped."""
    proc = Path("/proc", str(process))
    return {
        "memory": lambda: opened(proc / "mem", os.O_RDWR),
        "addresses": lambda: (proc / "maps").read_text(),
        "mapped files": lambda: os.listdir(proc / "map_files"),
        "open files": lambda: os.listdir(proc / "fd"),
        "process_vm_readv": lambda: read_memory(process, address),
        "ptrace": lambda: attach(process),
    }


def attempts_on_folder(folder: Path) -> dict[str, Callable[[], Any]]:
    """What may be tried on a folder of ranks."""
    new = folder / "x"
    return {"list": lambda: os.listdir(folder), "make": lambda: (opened(new, os.O_CREAT | os.O_WRONLY), os.unlink(new))}


def worked(what: str, attempts: dict[str, Callable[[], Any]]) -> list[str]:
    """Names of the attempts that nothing kept from succeeding."""
    found = []
    for name, attempt in attempts.items():
        with contextlib.suppress(OSError):
            attempt()
            found.append(f"{name} {what}")
    return found


def main() -> None:
    """Becomes the user, tries everything, prints the result."""
    user, address, folder, *processes = sys.argv[1:]
    # <namespace>_<process>_<random>
    paths = [path for each in processes for path in Path(folder).glob(f"*_{each}_*")]
    if int(user) != os.geteuid():
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
    successes = worked(folder, attempts_on_folder(Path(folder)))
    successes += [text for path in paths for text in worked(path.name, attempts_on(path))]
    for process in processes if int(address) else []:
        successes += worked(process, attempts_on_process(int(process), int(address)))
    sys.stdout.write(json.dumps(successes))


if __name__ == "__main__":
    main()
