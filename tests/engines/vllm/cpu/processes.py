"""What processes of a real vLLM need, wherever they run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
from typing import TYPE_CHECKING

from tests.engines.vllm.contract.wheels import ROOT

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

PORTS = range(20000, 30000)
"""None that the system gives to connections."""


def free_port(num_ports: int = 8) -> int:
    """The first of some free ports, since vLLM takes the next ones, too."""
    chosen = random.SystemRandom()
    while True:
        first = chosen.randrange(PORTS.start, PORTS.stop, num_ports)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + num_ports):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def cpu_environment(folder: Path, wait_secs: float) -> dict[str, str]:
    """The environment of an engine on CPU: this process's, without choices that would change the outcome.

    Args:
        folder: for what vLLM keeps. wait_secs: EP_A2A_TIMEOUT_SECS.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EP_A2A_", "VLLM_"))}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "EP_A2A_TIMEOUT_SECS": str(wait_secs),
    }


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it has started: one that was stopped would not end with the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
