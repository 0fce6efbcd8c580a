"""A real vLLM engine on GPUs, data-parallel ranks with our backend: against vLLM's own backend, and against itself.

Both backends get the same batches, so their completions differ by rounding only: sums are of another order.
"""

import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.vllm.cpu.changes import EXTENSION, Changes
from tests.engines.vllm.gpu.compare import compare
from tests.engines.vllm.gpu.engine import Action, Run, arguments, run_engine
from tests.engines.vllm.models import SHAPES, quantized, save_model
from tests.engines.vllm.trained import known_prompts, trained_model
from tests.markers import needs_gpus, needs_own_gpus

NUM_RANKS = int(os.environ.get("EP_A2A_TEST_VLLM_RANKS", "2"))
"""Data-parallel ranks, a GPU each."""
RUN_TIMEOUT_SECS = 400
OURS, BATCHED, THEIRS = "ep_a2a", "ep_a2a_low_latency", "allgather_reducescatter"
LOGPROB_TOLERANCES = {"bfloat16": 0.5, "float32": 1e-3}
"""In nats. A bfloat16 has 8 bits, and by rounding another expert may come last: 0.32 was seen. float32 is strict."""
FLOAT32 = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
"""FlashAttention does not take float32."""
IEEE = {"TRITON_F32_DEFAULT": "ieee"}
"""Of Triton, whose products of float32 matrices are of tf32 by default."""
MANY = 200
"""Tokens; one per step, so an engine is in the middle of them when it is told to stop after FEW."""
FEW = 8
"""Well before the 32nd step, at whose end engines of vLLM wait for each other without looking at their workers."""
STOPPED_RANK = 1
WAIT_SECS = 10
"""EP_A2A_TIMEOUT_SECS where a rank stops."""
END_SECS = 10
"""Given to an engine to tell its client of an error."""
SMALL = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.12}
"""So that engines of several tests fit on one GPU; the first bounds the cache, the second is what must be free."""
CAPTURED = {"compilation_config": {"cudagraph_capture_sizes": [1, 8, 12, 32, 64]}}
"""12: sequences of a rank in `tokens`. vLLM splits no step whose second half would be nothing but padding."""
EAGER = {"enforce_eager": True}
SPLIT = {"enable_dbo": True, "dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 16}
"""Dual batch overlap in most steps of `tokens`."""
SHORT = {"max_model_len": 128}
"""For models that know a text."""
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.timeout(3 * RUN_TIMEOUT_SECS + 120),
    needs_gpus(NUM_RANKS),
    pytest.mark.skipif(
        torch.cuda.device_count() == 1 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1",
        reason="NCCL takes several ranks of one GPU from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1",
    ),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `pip install vllm`"),
]


def tokens(label: str, **changed: int) -> Action:
    return {"action": "tokens", "label": label, "num_prompts": 24, "num_tokens": 32} | changed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's model, in bfloat16 or with fp8 in blocks; made when it is first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def made(family: str) -> Path:
        path, shape = folder / family, family.removesuffix("-fp8")
        config = quantized(SHAPES[shape]) if family != shape else SHAPES[shape]
        return path if path.exists() else save_model(path, config)

    return made


def run(
    folder: Path,
    model: Path,
    backend: str,
    actions: list[Action],
    engine: dict[str, Any],
    num_ranks: int = NUM_RANKS,
    **variables: str,
) -> Run:
    """Runs one engine, and checks whose kernels it used. `num_ranks` are data-parallel."""
    engine = arguments(model, backend, **SMALL | engine)
    done = run_engine(folder, engine, actions, num_ranks, RUN_TIMEOUT_SECS, **variables)
    assert done.logs[0].count("ep_a2a: IntraNode kernels") == (backend != THEIRS), done.logs[0][-3000:]
    return done


def run_each(
    folder: Path,
    model: Path,
    action: Action,
    engines: list[tuple[str, dict[str, Any]]],
    num_ranks: int = NUM_RANKS,
    **variables: str,
) -> list[Run]:
    """Engines of these backends and arguments do the action, one engine after another."""
    return [
        run(folder / f"{place}", model, backend, [action], engine, num_ranks, **variables)
        for place, (backend, engine) in enumerate(engines)
    ]


def check_against_theirs(
    folder: Path,
    model: Path,
    action: Action,
    engine: dict[str, Any],
    num_ties: int = 0,
    num_ranks: int = NUM_RANKS,
    backend: str = OURS,
    **variables: str,
) -> Run:
    """Runs an engine of each backend and compares their completions. Returns ours."""
    ours, theirs = run_each(folder, model, action, [(backend, engine), (THEIRS, engine)], num_ranks, **variables)
    difference = compare(*(each.completions(action["label"]) for each in (ours, theirs)))
    assert difference.is_rounding(LOGPROB_TOLERANCES[engine.get("dtype", "bfloat16")], num_ties), difference
    assert ours.error == ""
    return ours


def test_tokens_of_shared_experts_are_those_of_allgather_reducescatter(model, tmp_path):
    """In bfloat16; a model without them knows a text in it, below, and float32 is stricter."""
    check_against_theirs(tmp_path, model("deepseek_v2"), tokens("first"), CAPTURED)


@pytest.mark.parametrize("backend", [OURS, BATCHED])
@pytest.mark.parametrize("engine", [pytest.param(CAPTURED, id="graphs"), pytest.param(EAGER, id="eager")])
def test_tokens_are_those_of_allgather_reducescatter_in_float32(model, tmp_path, engine, backend):
    check_against_theirs(tmp_path, model("qwen3_moe"), tokens("first"), engine | FLOAT32, backend=backend, **IEEE)


def test_tokens_are_those_of_one_rank_in_float32(model, tmp_path):
    """One engine on one GPU, which has all experts and all prompts, and no all-to-all."""
    path, action, engine = model("qwen3_moe"), tokens("first"), CAPTURED | FLOAT32
    ours = run(tmp_path / "ours", path, OURS, [action], engine, **IEEE).completions("first")
    alone = run(tmp_path / "alone", path, THEIRS, [action], engine, num_ranks=1, **IEEE).completions("first")
    # ranks leave out prompts, and odd ranks end earlier
    expected = {
        number: {key: steps[: len(ours[number]["tokens"])] for key, steps in alone[number].items()} for number in ours
    }
    difference = compare(ours, expected)
    assert difference.is_rounding(LOGPROB_TOLERANCES["float32"]), difference


def run_and_count_splits(folder: Path, model: Path, action: Action, engine: dict[str, Any]) -> Run:
    """Our engine, which must split most steps of the action, or none, as the options say."""
    actions = [{"action": "split_steps", "label": "before"}, action, {"action": "split_steps", "label": "after"}]
    engine = engine | {"worker_extension_cls": EXTENSION}
    done = run(folder, model, OURS, actions, engine, **Changes(counts_splits=True).variables())
    least, most = (action["num_tokens"] // 2, math.inf) if engine.get("enable_dbo") else (0, 0)
    for before, after in zip(done.of("before"), done.of("after"), strict=True):
        assert least <= after["workers"][0] - before["workers"][0] <= most
    assert done.error == ""
    return done


@pytest.mark.parametrize("options", [pytest.param({}, id="whole"), pytest.param(SPLIT, id="dbo")])
@pytest.mark.parametrize("mode", [pytest.param(CAPTURED, id="graphs"), pytest.param(EAGER, id="eager")])
def test_a_known_text_goes_on_to_its_end(tmp_path, mode, options):
    """In bfloat16, with a model that knows it by heart: with whole steps, and with dual batch overlap."""
    action = tokens("first", num_tokens=24) | {"known": True}
    path = trained_model(Path(sys.executable), "qwen3_moe")
    done = run_and_count_splits(tmp_path, path, action, mode | SHORT | options)
    expected = known_prompts(action["num_prompts"], action["num_tokens"])
    for number, completion in done.completions("first").items():
        got = completion["tokens"]
        assert got == expected[number][1][: len(got)], number


def test_tokens_with_dbo_are_those_without(model, tmp_path):
    """Of a model with shared experts."""
    split, whole = (
        run_and_count_splits(tmp_path / name, model("deepseek_v2"), tokens("first"), CAPTURED | options)
        for name, options in (("split", SPLIT), ("whole", {}))
    )
    difference = compare(*(each.completions("first") for each in (split, whole)))
    assert difference.is_rounding(LOGPROB_TOLERANCES["bfloat16"]), difference


def check_survivors_name_the_stopped_rank(done: Run) -> None:
    cause = f"expected every rank within timeout_secs = {WAIT_SECS}; got rank {STOPPED_RANK} is late"
    assert all(cause in log for rank, log in enumerate(done.logs) if rank != STOPPED_RANK)


def test_a_stopped_rank_is_named_with_dbo(model, tmp_path):
    """Without graphs, so that threads of micro-batches are waiting for each other when it stops."""
    file = tmp_path / "stop"
    # an engine that runs its worker itself waits for the stopped rank before its next step, and never sees the error
    engine = EAGER | SPLIT | {"worker_extension_cls": EXTENSION, "distributed_executor_backend": "mp"}
    action = tokens("first", num_tokens=MANY) | {"action": "tokens_until_failure", "few": FEW, "file": str(file)}
    variables = Changes(STOPPED_RANK, stop_file=str(file)).variables() | {"EP_A2A_TIMEOUT_SECS": str(WAIT_SECS)}
    done = run(tmp_path, model("qwen3_moe"), OURS, [action], engine, **variables)
    survivors = done.of("first", num_ranks=NUM_RANKS - 1)
    assert file.read_text() == "dispatch", survivors
    check_survivors_name_the_stopped_rank(done)
    for survivor in survivors:
        # each of the two micro-batches waits for itself
        assert survivor["secs"] < 2 * WAIT_SECS + END_SECS


@needs_own_gpus(4, "vLLM")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_of_replicas_of_two_tensor_parallel_workers(model, tmp_path, dtype):
    """Two data-parallel ranks of two workers each: the four workers are the EP group."""
    engine = CAPTURED | {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    more, variables = (FLOAT32, IEEE) if dtype == "float32" else ({}, {})
    check_against_theirs(tmp_path, model("qwen3_moe"), tokens("first"), engine | more, num_ranks=2, **variables)


@pytest.mark.parametrize(
    ("backend", "family", "mode", "other_mode"),
    [
        # where a sum is rounded otherwise, the next layer's fp8 is another
        pytest.param(OURS, "qwen3_moe-fp8", CAPTURED, EAGER, id="fp8-graphs"),
        pytest.param(BATCHED, "qwen3_moe-fp8", CAPTURED, EAGER, id="fp8-batched-graphs"),
        # with more ranks sums are of another order for more experts, and few bfloat16 tokens stay the same
        pytest.param(OURS, "qwen3_moe", EAGER, CAPTURED, id="bfloat16-eager"),
    ],
)
def test_tokens_are_no_further_off_than_those_of_vllms_own_two_modes(
    model, tmp_path, backend, family, mode, other_mode
):
    engines = [(backend, mode), (THEIRS, mode), (THEIRS, other_mode)]
    runs = run_each(tmp_path, model(family), tokens("first"), engines)
    ours, theirs, others = (each.completions("first") for each in runs)
    difference, own = compare(ours, theirs), compare(others, theirs)
    assert difference.first_logprob <= 2 * own.first_logprob, (difference, own)
    assert difference.num_agreed >= own.num_agreed / 2, (difference, own)


@pytest.mark.parametrize(
    ("use_async", "num_tokens", "num_ties"),
    # between steps all layers move at once, and the step waits for it; its batches lead to one tie, in float64, too
    [pytest.param(True, 500, 0, id="beside-steps"), pytest.param(False, 100, 1, id="between-steps")],
)
def test_tokens_while_experts_move_between_ranks(model, tmp_path, use_async, num_tokens, num_ties):
    """In float32, since in bfloat16 completions of this length part before most of the moves."""
    eplb = {"window_size": 10, "step_interval": 10, "num_redundant_experts": NUM_RANKS, "use_async": use_async}
    engine = CAPTURED | FLOAT32 | {"enable_eplb": True, "eplb_config": eplb}
    action = tokens("moving", num_prompts=12, num_tokens=num_tokens, longest=16)
    ours = check_against_theirs(tmp_path, model("qwen3_moe"), action, engine, num_ties, **IEEE)
    moves = moves_of(ours)
    assert len(moves) > 5
    assert all(("(async mode)" in move) == use_async for move in moves)


def moves_of(done: Run) -> list[str]:
    return [line for line in re.findall(r"Rearranging experts.*", done.logs[0]) if "profile" not in line]


@pytest.mark.parametrize(
    "scheduling",
    [
        # as by default: the worker, a process of its own, waits in the next step, and its engine sees this one fail
        pytest.param({"distributed_executor_backend": "mp"}, id="asynchronous"),
        pytest.param({"async_scheduling": False}, id="synchronous"),
    ],
)
def test_a_stopped_rank_is_named_and_no_token_of_the_step_comes_out(model, tmp_path, scheduling):
    """It stops before the replay of a step that the other rank replays; whatever came is what comes undisturbed."""
    file = tmp_path / "stop"
    actions = [
        tokens("first", num_tokens=MANY),
        tokens("until failure", num_tokens=MANY) | {"action": "tokens_until_failure", "few": FEW, "file": str(file)},
    ]
    engine = CAPTURED | scheduling | {"worker_extension_cls": EXTENSION}
    variables = Changes(STOPPED_RANK, stop_file=str(file)).variables() | {"EP_A2A_TIMEOUT_SECS": str(WAIT_SECS)}
    done = run(tmp_path, model("qwen3_moe"), OURS, actions, engine, **variables)
    survivors = done.of("until failure", num_ranks=NUM_RANKS - 1)
    assert file.read_text() == "replay"
    check_survivors_name_the_stopped_rank(done)
    undisturbed = done.completions("first")
    for survivor in survivors:
        assert survivor["secs"] < WAIT_SECS + END_SECS
        for number, got in survivor["tokens"].items():
            assert FEW <= len(got) < MANY
            assert got == undisturbed[int(number)]["tokens"][: len(got)]


DISTURBANCES = {
    "after sleep level 1": {"action": "sleep", "level": 1},
    "after reload": {"action": "reload"},
    "after sleep level 2 and reload": {"action": "sleep", "level": 2},
}


@pytest.fixture(scope="module")
def disturbed(model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One engine with captured graphs, which sleeps and reads its weights again between the same prompts."""
    actions = [tokens("first")]
    for label, action in DISTURBANCES.items():
        actions += [action, tokens(label)]
    engine = CAPTURED | {"enable_sleep_mode": True}
    return run(tmp_path_factory.mktemp("disturbed"), model("qwen3_moe"), OURS, actions, engine)


@pytest.mark.parametrize("label", DISTURBANCES)
def test_the_same_tokens_and_log_probabilities(disturbed, label):
    """To the bit: graphs still point at the op's buffers, and the buffers are as they were."""
    assert disturbed.completions(label) == disturbed.completions("first")


def test_a_disturbed_engine_ends_well(disturbed):
    assert disturbed.error == ""
