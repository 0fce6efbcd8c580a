"""Shapes, routings and orders of calls that nobody thought of: the op in the simulator, by hypothesis.

The examples are the same in every run of CI; `make seeds` draws others, and more. A failing one is shrunk and printed:
paste its Case into tests/cases/op_matrix.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_a2a.config import FP8_DTYPE
from ep_a2a.routing import ROUTINGS
from tests.cases import op_cases
from tests.cases.call_orders import CALLS, GO_ON, GO_ON_IN_HALVES, INDEX_OF, OTHERS, Action, run_actions
from tests.simulator.ranks import Context
from tests.simulator.runs import run_on_ranks
from tests.simulator.seeds import FIRST_SEED, TIMES

MAX_STEPS = 3
MAX_TOKENS = 8
LAYOUTS = ("compact", "rank_major", "expert_major")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8_DTYPE)
FIRST_EPOCHS = (0, 0, 2**31 - 2, 2**32 - 2)
PAD_IDS = (-1, -7, 0, 12345)


@st.composite
def token_counts(draw: st.DrawFn, world_size: int, max_tokens: int) -> tuple[Any, Any]:
    """T by rank for each step, and each step's step_tokens, which bounds it (None: M)."""
    tokens, strides = [], []
    for _ in range(draw(st.integers(1, MAX_STEPS))):
        stride = draw(st.none() | st.integers(1, max_tokens))
        most = stride or max_tokens
        tokens.append(tuple(draw(st.integers(0, most)) for _ in range(world_size)))
        strides.append(stride)
    return tuple(tokens), tuple(strides)


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Any]:
    """Hidden size, dtype, casts and scales that go together: rows are multiples of 16 bytes, cast or not."""
    dtype = draw(st.sampled_from(DTYPES))
    quant_type = "none"
    if dtype != FP8_DTYPE:
        quant_type = draw(st.sampled_from(("none", "none", "fp8_per_token", "fp8_per_1x128")))
    combine_quant = draw(st.sampled_from(("none", "none", "fp8_blockwise", "fp8_direct_cast")))
    if quant_type == "fp8_per_1x128" or combine_quant == "fp8_blockwise":
        hidden_dim = draw(st.sampled_from((128, 256)))
    else:
        step = 16 if quant_type != "none" or combine_quant != "none" or dtype == FP8_DTYPE else 8
        hidden_dim = step * draw(st.integers(1, 96 // step))
    chosen: dict[str, Any] = {"dtype": dtype, "quant_type": quant_type, "hidden_dim": hidden_dim}
    if quant_type != "none":
        chosen["scale_format"] = draw(st.sampled_from(("float32", "ue8m0")))
    elif draw(st.booleans()):
        chosen["scale_dim"] = draw(st.integers(1, 5))
        chosen["scale_dtype"] = draw(st.sampled_from((torch.float32, torch.uint8)))
    options: dict[str, Any] = {}
    if combine_quant != "none":
        chosen["quant_type"] = combine_quant
        if quant_type != "none":
            options["dispatch_quant_type"] = quant_type
    if quant_type == "none" and draw(st.booleans()):
        options["combine_dtype"] = torch.float32
    # of at most MAX_TOKENS tokens: none, some, or all steps are flagged
    options["flagged_max_tokens"] = draw(st.sampled_from((0, 1, 3, MAX_TOKENS, 128)))
    return chosen | {"options": options, "unusual": draw(st.booleans())}


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> op_cases.Case:
    max_tokens = draw(st.integers(1, MAX_TOKENS))
    tokens, strides = draw(token_counts(world_size, max_tokens))
    layout = draw(st.sampled_from(LAYOUTS))
    payload = draw(payloads())
    if layout == "expert_major":
        payload.setdefault("options", {})["expert_alignment"] = draw(st.integers(1, 5))
    with_weights = layout == "expert_major" or draw(st.booleans())
    return op_cases.Case(
        world_size=world_size,
        topk=draw(st.integers(1, 8)),
        num_experts=draw(st.integers(1, 13)),
        max_tokens=max_tokens,
        layout=layout,
        routing=draw(st.sampled_from(sorted(ROUTINGS))),
        tokens=tokens,
        num_steps=len(tokens),
        with_weights=with_weights,
        combine_weights=with_weights and draw(st.booleans()),
        zero_copy=draw(st.booleans()),
        pad_id=draw(st.sampled_from(PAD_IDS)),
        step_tokens=strides,
        first_epoch=draw(st.sampled_from(FIRST_EPOCHS)),
        seed=draw(st.integers(0, 1000)),
        split=draw(st.sampled_from(("", "all", "mixed"))),
        **payload,
    )


def largest_total(case: op_cases.Case) -> int:
    """The most rows that any rank receives in any step."""
    totals = [0]
    for number in range(case.num_steps):
        everyone = [op_cases.make_inputs(case, number, rank) for rank in range(case.world_size)]
        totals += [each.total_recv for each in op_cases.reference_of(case, number, everyone)]
    return max(totals)


@st.composite
def padded_cases(draw: st.DrawFn, world_size: int) -> tuple[op_cases.Case, list[int]]:
    """A case with a pad_id for every step: rows without a token where the step before had more, or as many as fit."""
    case = draw(cases(world_size))
    pad_ids = draw(st.lists(st.sampled_from(PAD_IDS), min_size=3, max_size=7))
    case = replace(case, num_steps=len(pad_ids))
    if case.layout == "compact" and draw(st.booleans()):
        case = op_cases.with_options(case, max_total_recv_tokens=max(1, largest_total(case)))
    return case, pad_ids


def run_with_pad_ids(context: Context, case: op_cases.Case, pad_ids: list[int]) -> None:
    """run_case with another pad_id in every step."""
    with op_cases.built_op(context, case) as op:
        op_cases.set_first_epoch(op, case, op.arena)
        for number, pad_id in enumerate(pad_ids):
            op_cases.run_step(replace(case, pad_id=pad_id), op, number, context.device)
        op.check()


NUM_ACTIONS = 40
# as many that go on as others, or steps would hardly ever come to their end
DRAWN = (*CALLS, *OTHERS, *(GO_ON,) * (len(CALLS) // 2), *(GO_ON_IN_HALVES,) * (len(CALLS) // 2))


@st.composite
def orders(draw: st.DrawFn, world_size: int) -> tuple[op_cases.Case, list[Action]]:
    """A case without the end of the epochs, since ops are built anew, and what is done, right or wrong."""
    case = replace(draw(cases(world_size)), first_epoch=0)
    action = st.tuples(st.integers(0, len(INDEX_OF) - 1), st.sampled_from(DRAWN))
    return case, draw(st.lists(action, min_size=NUM_ACTIONS, max_size=NUM_ACTIONS))


FUZZ: dict[str, tuple[Any, Any, dict[int, int]]] = {
    "steps": (run_with_pad_ids, padded_cases, {2: 8, 3: 12}),
    "orders": (run_actions, orders, {2: 2, 3: 2}),
}
"""By name: a body, what is drawn for it, and the number of examples by that of ranks. `make test` has two ranks."""


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FUZZ)
def test_fuzz(name: str, world_size: int) -> None:
    body, drawn, num_examples = FUZZ[name]

    @settings(max_examples=num_examples[world_size] * TIMES, derandomize=FIRST_SEED == 1, database=None)
    @given(drawn(world_size))
    def run(arguments: tuple[Any, ...]) -> None:
        run_on_ranks(body, world_size, *arguments)

    run()
