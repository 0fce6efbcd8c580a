"""Runs of tests.engines.vllm.cpu.program: a process per data-parallel rank, and what has come of it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.engines.vllm.contract.wheels import PYTHON_WITH_DEPENDENCIES, ROOT
from tests.engines.vllm.cpu.program import NUM_TOKENS, PROMPTS
from tests.engines.vllm.processes import cpu_environment, end_group, free_port, rank_variables

if TYPE_CHECKING:
    from pathlib import Path

RUN_TIMEOUT_SECS = 900
LOGPROB_TOLERANCE = 1e-4
"""float32 sums of another order, through three layers; 3e-6 was seen."""
WAIT_SECS = 20
"""EP_A2A_TIMEOUT_SECS: some seconds per step are usual, since kernels are interpreted."""


@dataclass
class Run:
    """Processes of data-parallel ranks: exit codes, results by prompt, logs, and counters of each rank's workers."""

    exit_codes: list[int | None]
    results: dict[int, dict[str, Any]]
    logs: list[str]
    counters: dict[int, Any]

    def require_success(self) -> None:
        tails = [f"--- rank {rank} ---\n{log[-3000:]}" for rank, log in enumerate(self.logs)]
        assert set(self.exit_codes) == {0}, "\n".join(tails)


def run_engine(folder: Path, model: Path, num_ranks: int, *options: str, finishes: int = -1, **variables: str) -> Run:
    """Runs one engine process per rank until all end, or rank `finishes` does; the others are killed then.

    `variables` are added to the environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(num_ranks):
            ranks.append(_start(folder, model, rank, num_ranks, port, options, variables))
            stack.callback(end_group, ranks[-1])
        deadline = time.monotonic() + RUN_TIMEOUT_SECS
        waited_for = ranks if finishes < 0 else [ranks[finishes]]
        for process in waited_for:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
    results: dict[int, dict[str, Any]] = {}
    counters: dict[int, Any] = {}
    for path in folder.glob("*.json"):
        found = json.loads(path.read_text())
        counters[int(path.stem)] = found.pop("counters", None)
        results |= {int(number): result for number, result in found.items()}
    logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(num_ranks)]
    return Run([process.returncode for process in ranks], results, logs, counters)


def _start(
    folder: Path, model: Path, rank: int, num_ranks: int, port: int, options: tuple[str, ...], more: dict[str, str]
) -> subprocess.Popen[bytes]:
    variables = cpu_environment(folder, WAIT_SECS) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if num_ranks > 1:
        variables |= rank_variables(rank, num_ranks, port)
        options = ("--expert-parallel", *options)
    command = [PYTHON_WITH_DEPENDENCIES, "-m", "tests.engines.vllm.cpu.program", model, folder / f"{rank}.json"]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*map(str, command), *options],
            cwd=ROOT,
            env=variables | more,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def check_equal(got: dict[int, Any], expected: dict[int, Any], num_tokens: int = NUM_TOKENS) -> None:
    assert sorted(got) == list(range(len(PROMPTS)))
    for number, completion in got.items():
        length = len(completion["tokens"])
        assert length >= num_tokens - 2
        assert completion["tokens"] == expected[number]["tokens"][:length], number
        differences = [abs(a - b) for a, b in zip(completion["logprobs"], expected[number]["logprobs"])]
        assert max(differences) <= LOGPROB_TOLERANCE, number
