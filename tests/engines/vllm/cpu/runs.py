"""Runs of tests.engines.vllm.cpu.program: a process per data-parallel rank, and what has come of it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.engines.vllm.contract.wheels import PYTHON_WITH_DEPENDENCIES
from tests.engines.vllm.cpu.program import PROMPTS, Options
from tests.engines.vllm.processes import NUM_PORTS, cpu_environment, rank_variables, run_ranks
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


def run_engine(folder: Path, model: Path, num_ranks: int, options: Options, **variables: str) -> Run:
    """Runs one engine process per rank until all end, or one fails. `variables` are added to the environment."""
    (folder / "job").write_text(json.dumps({"model": str(model), "options": asdict(options)}))
    port = free_port(NUM_PORTS)
    environment = cpu_environment(folder, WAIT_SECS) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | variables
    command = [str(PYTHON_WITH_DEPENDENCIES), "-m", "tests.engines.vllm.cpu.program"]
    of_ranks = [rank_variables(rank, num_ranks, port) if num_ranks > 1 else {} for rank in range(num_ranks)]
    exit_codes, logs, _ = run_ranks(command, folder, [environment | each for each in of_ranks], RUN_TIMEOUT_SECS)
    results: dict[int, dict[str, Any]] = {}
    for path in folder.glob("*.json"):
        results |= {int(number): result for number, result in json.loads(path.read_text()).items()}
    return Run(folder, exit_codes, results, logs)


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
