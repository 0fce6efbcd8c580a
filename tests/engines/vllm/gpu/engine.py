"""A real vLLM engine of several data-parallel ranks on GPUs: starts it, waits no longer than agreed, and collects."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_a2a.testing.mps import Mps, MpsDaemon, find_mps
from tests.engines.vllm.processes import NUM_PORTS, SHARED_VARIABLE, rank_variables, run_ranks
from tests.integration.programs import environment
from tests.ports import free_port

Action = dict[str, Any]
"""`action`, the name of a method of rank.Rank, and its arguments; `label`, by which its reports can be asked for."""

KV_CACHE_BYTES = 8 << 30
"""Fixed, so that engines of several tests may be up at once: vLLM would take what others give back for its own."""
LOG_CHARS = 4000
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
        common = environment() | FIXED | shared | variables
        # vLLM puts the local rank on the GPU of that number: all on the only one, where there is one
        of_ranks = [
            common
            | rank_variables(rank, num_ranks, port)
            | {"VLLM_DP_RANK_LOCAL": str(rank % torch.cuda.device_count())}
            for rank in range(num_ranks)
        ]
        _, logs, error = run_ranks([sys.executable, "-m", program], folder, of_ranks, limit_secs)
    reports = [_read_lines(folder / f"{rank}.jsonl") for rank in range(num_ranks)]
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


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
