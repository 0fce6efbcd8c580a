"""A real vLLM engine of several data-parallel ranks on GPUs: starts it, waits no longer than agreed, and collects."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_a2a.testing.mps import Mps, MpsDaemon, find_mps
from tests.engines.vllm.processes import NUM_PORTS, SHARED_VARIABLE, end_group, rank_variables
from tests.integration.programs import ROOT, environment
from tests.ports import free_port
from tests.waiting import happens

Action = dict[str, Any]
"""`action`, the name of a method of rank.Rank, and its arguments; `label`, by which its reports can be asked for."""

KV_CACHE_BYTES = 8 << 30
"""Fixed, so that engines of several tests may be up at once: vLLM would take what others give back for its own."""
LOG_CHARS = 4000
LAST_WORDS_SECS = 5
"""Given to the other ranks when one has failed, and to all to write their stacks before they are killed."""
FIXED = {
    # the sampler is not what is tested, and FlashInfer may not be there
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
SENDS_FUNCTIONS = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""For engines with dummy weights: the function that fills them travels to the workers."""


@dataclass
class Run:
    """What became of an engine: each rank's reports and log, and why it was ended if it did not end by itself."""

    reports: list[list[dict[str, Any]]]
    logs: list[str]
    error: str

    def of(self, label: str, num_ranks: int = 0) -> list[dict[str, Any]]:
        """What ranks reported of an action: all of them, or `num_ranks`."""
        found = self.reported(label)
        assert len(found) == (num_ranks or len(self.reports)), f"{label!r} is not done: {self.tails()}"
        return found

    def reported(self, label: str) -> list[dict[str, Any]]:
        """What those ranks reported of an action that have done it."""
        return [report for reports in self.reports for report in reports if report["label"] == label]

    def tails(self) -> str:
        """Why it was ended, and the ends of the logs."""
        return "\n".join(
            [self.error, *(f"--- rank {rank} ---\n{log[-LOG_CHARS:]}" for rank, log in enumerate(self.logs))]
        )

    def completions(self, label: str) -> dict[int, Any]:
        """What an action `tokens` gave, by the number of the prompt."""
        return {int(number): each for report in self.of(label) for number, each in report["completions"].items()}


def arguments(model: Path, backend: str, **more: Any) -> dict[str, Any]:
    """Arguments of vllm.LLM for an expert-parallel engine with an all-to-all backend."""
    found: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "distributed_executor_backend": "uni",
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "moe_backend": "triton",
        "enable_expert_parallel": True,
        "all2all_backend": backend,
    }
    return found | more


def run_engine(
    folder: Path,
    engine: dict[str, Any],
    actions: list[Action],
    num_ranks: int,
    limit_secs: float,
    program: str = "tests.engines.vllm.gpu.rank",
    **variables: str,
) -> Run:
    """Runs one process of `program` per rank that does the actions, until all end, one fails, or the time is over.

    `engine` are arguments of vllm.LLM, `variables` are added to the environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = {"engine": engine, "actions": actions, "num_ranks": num_ranks}
    (folder / "job.json").write_text(json.dumps(job))
    port = free_port(NUM_PORTS)
    with shared_gpu(num_ranks) as shared:
        variables = shared | variables
        processes = [_start(program, folder, rank, num_ranks, port, variables) for rank in range(num_ranks)]
        try:
            error = _wait(processes, limit_secs)
        finally:
            for process in processes:
                end_group(process)
    reports = [_read_lines(folder / f"{rank}.jsonl") for rank in range(num_ranks)]
    logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(num_ranks)]
    return Run(reports, logs, error)


@contextlib.contextmanager
def shared_gpu(num_ranks: int) -> Iterator[dict[str, str]]:
    """What ranks need that share a GPU. One that dies can break their MPS daemon, so each engine has its own."""
    if num_ranks <= torch.cuda.device_count():
        yield {}
        return
    variables = {SHARED_VARIABLE: "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "4"}
    if find_mps() is not Mps.PRIVATE:
        yield variables
        return
    with contextlib.closing(MpsDaemon()) as daemon:
        yield variables | daemon.variables


def _start(
    program: str, folder: Path, rank: int, num_ranks: int, port: int, variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    # vLLM puts the local rank on the GPU of that number: all on the only one, where there is one
    local_rank = rank % torch.cuda.device_count()
    ranks = rank_variables(rank, num_ranks, port) | {"VLLM_DP_RANK_LOCAL": str(local_rank)}
    command = [sys.executable, "-m", program, str(folder), str(rank)]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | FIXED | ranks | variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


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


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
