"""The backends on torch.distributed, on GPUs over NCCL: the bodies of tests/multiprocess."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_a2a.config import FP8_DTYPE
from tests.cases import manager_cases, manager_layer_cases
from tests.cases.manager_cases import COLLECTIVE
from tests.cases.op_cases import Case
from tests.cases.op_matrix import CASES
from tests.markers import needs_own_gpus
from tests.multigpu.cases import fitted

pytestmark = needs_own_gpus(2)

both = pytest.mark.parametrize("name", COLLECTIVE)
WORLD_SIZE = fitted(Case()).world_size
OP_CASES = (
    "zero-copy-compact",
    "step-tokens-rank-major",
    "packed-given-scales",
    "pad-id",
    "cap",
    "fp8-byte-scales",
    "fp8_per_1x128-ue8m0",
    "cast-fp32-compact",
    "no-weights",
    "nobody-has-tokens",
    "few-experts",
)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8_DTYPE], ids=str)
def test_tokens(ranks: Any, dtype: torch.dtype, name: str) -> None:
    ranks(manager_layer_cases.layer_on_a_manager, WORLD_SIZE, name, {}, dtype)


@both
@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in OP_CASES])
def test_op(ranks: Any, case: Case, name: str) -> None:
    case = replace(case, world_size=WORLD_SIZE)
    ranks(manager_cases.run_case_on, WORLD_SIZE, name, case)


BODIES = (
    manager_cases.other_forms,
    manager_layer_cases.over_a_group_with_gloo_only,
    manager_cases.ranks_that_disagree,
    manager_cases.wrong_use,
    manager_cases.capture_is_refused,
)


@both
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(ranks: Any, body: Any, name: str) -> None:
    ranks(body, WORLD_SIZE, name)
