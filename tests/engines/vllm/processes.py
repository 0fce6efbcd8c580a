"""What processes of a real vLLM need, wherever they run."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from tests.engines.vllm.contract.wheels import ROOT
from tests.waiting import happens

SHARED_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""In the environment of ranks that share a GPU."""
NUM_PORTS = 8
"""vLLM takes the ports behind its first one, too."""
LAST_WORDS_SECS = 15
"""Given to the other ranks when one has failed, and to all to write their stacks before they are killed."""


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


def run_ranks(
    command: list[str], folder: Path, environments: list[dict[str, str]], limit_secs: float
) -> tuple[list[int | None], list[str], str]:
    """Runs a process per rank until all end, one fails, or the time is over; then kills what is left.

    Args:
        command: is given the folder and the number of the rank. folder: for logs. environments: by rank.

    Returns:
        (exit codes, None for those that did not end by themselves; logs; why they did not end well, "" if they did).
    """
    processes, paths = [], [folder / f"{rank}.log" for rank in range(len(environments))]
    for rank, (path, variables) in enumerate(zip(paths, environments)):
        words = [*command, str(folder), str(rank)]
        with path.open("wb") as log:
            processes.append(
                subprocess.Popen(words, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True)
            )
    try:
        error = _wait(processes, limit_secs)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            end_group(process)
    return codes, [path.read_text(errors="replace") for path in paths], error


def _wait(processes: list[subprocess.Popen[bytes]], limit_secs: float) -> str:
    """Why the engine did not end well, if so."""

    def have_ended() -> bool:
        return all(process.poll() is not None for process in processes)

    def failed() -> list[int]:
        return [rank for rank, process in enumerate(processes) if process.poll() not in (0, None)]

    if not happens(lambda: failed() or have_ended(), limit_secs):
        for process in processes:
            # a rank and what it has started: its session is its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGUSR2)
        happens(have_ended, LAST_WORDS_SECS)
        return f"not finished after {limit_secs:.0f} s"
    if not failed():
        return ""
    happens(have_ended, LAST_WORDS_SECS)
    return f"rank {failed()[0]} ended with status {processes[failed()[0]].returncode}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it has started: one that was stopped would not end with the others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
