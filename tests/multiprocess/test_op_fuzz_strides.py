"""Tensors laid out in memory in ways that nobody thought of, on CPU processes against the oracle, by hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.op_cases import Case
from tests.cases.stride_cases import LAYOUTS, ROLES, Forms, strided_case
from tests.multiprocess.test_op_fuzz import cases, fuzz

NUM_EXAMPLES = {2: 25, 3: 6}
IN_EVERY_LAYOUT: list[list[Forms]] = [[dict.fromkeys(ROLES, layout)] * 2 for layout in LAYOUTS for _ in range(2)]


@st.composite
def laid_out_cases(draw: st.DrawFn, world_size: int) -> tuple[Case, list[list[Forms]]]:
    """A case, and how each rank lays out its tensors in each step."""
    case = draw(cases(world_size))
    form = st.dictionaries(st.sampled_from(ROLES), st.sampled_from(sorted(LAYOUTS)), max_size=4)
    return case, [[draw(form) for _ in range(world_size)] for _ in range(case.num_steps)]


@pytest.mark.parametrize("world_size", NUM_EXAMPLES)
def test_strides(ranks: Any, world_size: int) -> None:
    @fuzz(NUM_EXAMPLES[world_size])
    @given(laid_out_cases(world_size))
    def run(drawn: tuple[Case, list[list[Forms]]]) -> None:
        ranks(strided_case, world_size, *drawn)

    run()


@pytest.mark.parametrize("flagged_max_tokens", [0, 128])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint8])
def test_lone_and_absent_rows_in_every_layout(ranks: Any, scale_dtype: torch.dtype, flagged_max_tokens: int) -> None:
    """A lone row is contiguous whatever its stride, which torch looks at even so."""
    case = Case(
        world_size=2,
        hidden_dim=8,
        max_tokens=4,
        tokens=((1, 1), (0, 1)),
        scale_dim=4,
        scale_dtype=scale_dtype,
        options={"flagged_max_tokens": flagged_max_tokens},
    )
    ranks(strided_case, 2, case, IN_EVERY_LAYOUT)


def test_rows_between_nodes_in_every_layout(ranks: Any) -> None:
    case = Case(
        world_size=2,
        hidden_dim=8,
        max_tokens=4,
        tokens=((1, 3), (0, 1)),
        scale_dim=4,
        scale_dtype=torch.uint8,
        num_nodes=2,
    )
    ranks(strided_case, 2, case, IN_EVERY_LAYOUT)
