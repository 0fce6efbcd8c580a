"""How bench.vllm.step_kernels reads a trace of torch's profiler, and the weights of its model."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.vllm.step_kernels import tables
from tests.engines.vllm.models import SHAPES, fill_dummy_weights

LAYER = ["gate", "topk", "dispatch", "experts|x", "combine"]
PREFILL = ["attention", "rms_norm", *LAYER, "add", "rms_norm_and_quant", "attention", "rms_norm", *LAYER, "rsqrt"]
DECODE = ["attention", "rms_norm", "gate", "topk", "experts", "rsqrt"]


def trace(path: Path, *steps: tuple[int, int, list[str]]) -> Path:
    """Writes a trace of steps (tokens of prompts, tokens of decode, kernels); kernel number n takes n us."""
    events: list[dict[str, Any]] = []
    start = 0
    for prompt, decode, names in steps:
        marked = f"execute_context_1({prompt})_generation_2({decode})"
        for begin, end in ((start, 100), (start + 2, 3)):
            mark = {"cat": "gpu_user_annotation", "name": marked, "ts": begin, "dur": end}
            events += [mark, mark | {"cat": "user_annotation"}]
        for number, name in enumerate(names):
            kernel = {"cat": "kernel", "name": name, "ts": start + number, "dur": number, "args": {"stream": 7}}
            events.append(kernel)
        start += 200
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events[::-1]}).encode()))
    return path


def test_a_table_has_medians_of_all_layers_of_steps_with_all_tokens(tmp_path: Path) -> None:
    path = trace(tmp_path / "rank0.gz", (8, 2, DECODE), (64, 0, PREFILL), (0, 4, DECODE), (0, 4, DECODE))
    prefill, decode = tables(path, 64, 4).split("### decode of 4 tokens, rank0")
    rows = [line.split(" | ") for line in prefill.splitlines() if line.startswith("| ") and " of 2" in line]
    names = ["gate |", "topk |", "dispatch |", "experts x |", "combine |", "add |", "rsqrt |", "rms_norm_and_quant |"]
    assert [row[3] for row in rows] == names
    # of the gate, kernels 2 and 11; of what only one layer has, its own
    assert [row[0] for row in rows[:1] + rows[-1:]] == ["| 6.5", "| 8.0"]
    assert [row[1] for row in rows[:1] + rows[-1:]] == ["2 of 2", "1 of 2"]
    assert decode.splitlines()[4:] == [
        "| 2.0 | 2 of 2 | 7 | gate |",
        "| 3.0 | 2 of 2 | 7 | topk |",
        "| 4.0 | 2 of 2 | 7 | experts |",
        "| 5.0 | 2 of 2 | 7 | rsqrt |",
        "| 8.0 | | | from the first one's begin to the last one's end |",
    ]


@pytest.mark.parametrize("steps", [[(63, 0, PREFILL), (0, 4, DECODE)], [(64, 0, PREFILL), (0, 3, DECODE)]])
def test_a_trace_without_a_whole_step_is_refused(tmp_path: Path, steps: list[tuple[int, int, list[str]]]) -> None:
    path = trace(tmp_path / "rank0.gz", *steps)
    with pytest.raises(ValueError, match="no step has"):
        tables(path, 64, 4)


def test_tokens_choose_experts_of_all_ranks() -> None:
    """DeepSeek-V3's gate takes the first ones of experts with equal scores, which all lie on rank 0."""
    shape = SHAPES["deepseek_v3"]
    num_experts, hidden = shape["n_routed_experts"], shape["hidden_size"]
    gate = torch.nn.Linear(hidden, num_experts, bias=False)
    torch.manual_seed(0)
    fill_dummy_weights(torch.nn.ModuleDict({"gate": gate}))
    scores = gate(torch.randn(64, hidden)).sigmoid()
    best = scores.view(64, shape["n_group"], -1).topk(2).values.sum(-1).topk(shape["topk_group"]).indices
    is_first_half = best < shape["n_group"] // 2
    assert 0.4 < is_first_half.float().mean() < 0.6
