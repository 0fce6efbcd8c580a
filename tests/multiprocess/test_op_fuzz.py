"""Shapes, routings and steps that nobody thought of: the op on CPU processes against the oracle, by hypothesis.

The examples are the same in every run. A failing one is printed as a Case and is not shrunk: each attempt would restart
the processes; paste it into tests/op_matrix.py instead.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ep_a2a.config import FP8_DTYPE
from ep_a2a.routing import ROUTINGS
from tests.op_cases import Case, run_case

MAX_EXAMPLES = 25
MAX_STEPS = 3
LAYOUTS = ("compact", "rank_major")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8_DTYPE)
FIRST_EPOCHS = (0, 0, 2**31 - 2, 2**32 - 2)


@st.composite
def token_counts(draw: st.DrawFn, world_size: int, max_tokens: int) -> tuple[Any, Any]:
    """T by rank for each step, and each step's max_num_tokens, which bounds it (None: M)."""
    tokens, strides = [], []
    for _ in range(draw(st.integers(1, MAX_STEPS))):
        stride = draw(st.none() | st.integers(1, max_tokens))
        most = stride or max_tokens
        tokens.append(tuple(draw(st.integers(0, most)) for _ in range(world_size)))
        strides.append(stride)
    return tuple(tokens), tuple(strides)


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Any]:
    """Hidden size, dtype, cast and scales that go together: rows are multiples of 16 bytes on the wire and in combine."""
    dtype = draw(st.sampled_from(DTYPES))
    quant_type = "none"
    if dtype != FP8_DTYPE:
        quant_type = draw(st.sampled_from(("none", "none", "fp8_per_token", "fp8_per_1x128")))
    if quant_type == "fp8_per_1x128":
        hidden_dim = draw(st.sampled_from((128, 256)))
    else:
        step = 16 if quant_type != "none" or dtype == FP8_DTYPE else 8
        hidden_dim = step * draw(st.integers(1, 96 // step))
    chosen: dict[str, Any] = {"dtype": dtype, "quant_type": quant_type, "hidden_dim": hidden_dim}
    if quant_type != "none":
        chosen["scale_format"] = draw(st.sampled_from(("float32", "ue8m0")))
    elif draw(st.booleans()):
        chosen["scale_dim"] = draw(st.integers(1, 5))
        chosen["scale_dtype"] = draw(st.sampled_from((torch.float32, torch.uint8)))
    if quant_type == "none" and draw(st.booleans()):
        chosen["options"] = {"combine_dtype": torch.float32}
    return chosen


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> Case:
    max_tokens = draw(st.integers(1, 8))
    tokens, strides = draw(token_counts(world_size, max_tokens))
    with_weights = draw(st.booleans())
    return Case(
        world_size=world_size,
        topk=draw(st.integers(1, 8)),
        num_experts=draw(st.integers(1, 13)),
        max_tokens=max_tokens,
        layout=draw(st.sampled_from(LAYOUTS)),
        routing=draw(st.sampled_from(sorted(ROUTINGS))),
        tokens=tokens,
        num_steps=len(tokens),
        with_weights=with_weights,
        combine_weights=with_weights and draw(st.booleans()),
        zero_copy=draw(st.booleans()),
        pad_id=draw(st.sampled_from((-1, -7, 0, 12345))),
        max_num_tokens=strides,
        first_epoch=draw(st.sampled_from(FIRST_EPOCHS)),
        seed=draw(st.integers(0, 1000)),
        **draw(payloads()),
    )


@pytest.mark.parametrize("world_size", [2, 3])
def test_fuzz(ranks: Any, world_size: int) -> None:
    @settings(
        max_examples=MAX_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
    )
    @given(cases(world_size))
    def run(case: Case) -> None:
        ranks(run_case, world_size, case)

    run()
