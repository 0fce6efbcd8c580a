"""What processes of a real vLLM need, wherever they run."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tests.engines.vllm.contract.wheels import ROOT

SHARED_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""In the environment of ranks that share a GPU."""
NUM_PORTS = 8
"""vLLM takes the ports behind its first one, too."""


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


def rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What tells a process which data-parallel rank of this host it is."""
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(num_ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it has started: one that was stopped would not end with the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
