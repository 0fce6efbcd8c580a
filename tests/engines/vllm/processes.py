"""What processes of a real vLLM need, wherever they run."""

import contextlib
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

from tests.engines.vllm.contract.wheels import ROOT

HEALTH_TIMEOUT_SECS = 10
LOG_CHARS = 4000
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


class Server:
    """`command`, whose options make it listen at `port` of this host.

    Args:
        command: its words.
        variables: the whole environment.
        port: where `command` listens.
        log: the file that gets all that it prints.
    """

    def __init__(self, command: list[str], variables: dict[str, str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=file, stderr=file, start_new_session=True
            )

    def is_up(self) -> bool:
        """Whether it answers."""
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=HEALTH_TIMEOUT_SECS):
            return True
        return False

    def has_ended(self) -> bool:
        """Whether its first process has ended."""
        return self._process.poll() is not None

    def wait(self, timeout_secs: float) -> int:
        """Returns the exit code of its first process."""
        return self._process.wait(timeout_secs)

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-LOG_CHARS:]

    def end(self) -> None:
        """Kills all its processes."""
        end_group(self._process)
