"""Runs of tests.engines.vllm.cpu.program: a process per data-parallel rank, and what has come of it."""

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.engines.vllm.contract.wheels import PYTHON_WITH_DEPENDENCIES, ROOT
from tests.engines.vllm.cpu.program import PROMPTS, Options
from tests.engines.vllm.processes import NUM_PORTS, cpu_environment, rank_variables
from tests.ports import free_port

RUN_TIMEOUT_SECS = 900
LOGPROB_TOLERANCES = {"float32": 1e-4, "bfloat16": 1.0}
"""In nats, of the likeliest tokens of a step, by the engine's dtype; sums are of another order."""
WAIT_SECS = 20
"""EP_A2A_TIMEOUT_SECS: some seconds per step are usual, since kernels are interpreted."""


@dataclass
class Run:
    """Processes of data-parallel ranks: exit codes, results by prompt, and logs.

    folder: where each rank has left its files.
    """

    folder: Path
    exit_codes: list[int | None]
    results: dict[int, dict[str, Any]]
    logs: list[str]

    def tails(self) -> str:
        return "\n".join(f"--- rank {rank} ---\n{log[-3000:]}" for rank, log in enumerate(self.logs))


class Starter:
    """A process that starts those of ranks: see tests.engines.vllm.cpu.starter."""

    def __init__(self, folder: Path) -> None:
        self._cache = folder
        command = [str(PYTHON_WITH_DEPENDENCIES), "-m", "tests.engines.vllm.cpu.starter"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=self._environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        """Ends it, with all that it has started."""
        self._process.communicate()

    def run(self, folder: Path, model: Path, num_ranks: int, options: Options, **variables: str) -> Run:
        """Runs one engine process per rank until all end; where the last one stops, until rank 0 does.

        `variables` are added to the environment.
        """
        port = free_port(NUM_PORTS)
        ranks = []
        for rank in range(num_ranks):
            environment = self._environment() | variables
            if num_ranks > 1:
                environment |= rank_variables(rank, num_ranks, port)
            files = {"result": str(folder / f"{rank}.json"), "log": str(folder / f"{rank}.log")}
            ranks.append(files | {"variables": environment})
        finishes = [0] if options.stop else list(range(num_ranks))
        run = {"model": str(model), "options": asdict(options), "ranks": ranks, "finishes": finishes}
        exit_codes = self._ask(run | {"timeout_secs": RUN_TIMEOUT_SECS})
        results: dict[int, dict[str, Any]] = {}
        for path in folder.glob("*.json"):
            results |= {int(number): result for number, result in json.loads(path.read_text()).items()}
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(num_ranks)]
        return Run(folder, exit_codes, results, logs)

    def _environment(self) -> dict[str, str]:
        return cpu_environment(self._cache, WAIT_SECS) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

    def _ask(self, run: dict[str, Any]) -> list[int | None]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(run) + "\n")
        self._process.stdin.flush()
        codes: list[int | None] = json.loads(self._process.stdout.readline())
        return codes


def check_equal(run: Run, expected: dict[int, Any], options: Options) -> None:
    """All tokens of all prompts must be the expected ones, and their log probabilities equal up to rounding."""
    got = run.results
    assert sorted(got) == list(range(len(PROMPTS))), run.tails()
    for number, completion in got.items():
        length = len(completion["tokens"])
        assert length >= options.num_tokens - 2
        assert completion["tokens"] == expected[number]["tokens"][:length], number
        for step, expected_step in zip(completion["logprobs"], expected[number]["logprobs"]):
            differences = [abs(step[token] - expected_step[token]) for token in step.keys() & expected_step.keys()]
            assert max(differences) <= LOGPROB_TOLERANCES[options.dtype], number
