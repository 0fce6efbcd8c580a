"""Backends stand in for each other: one layer on each manager's dispatch and combine, on CPU processes."""

from typing import Any

import pytest
import torch

from ep_a2a.config import FP8_DTYPE
from tests.cases import manager_layer_cases as cases
from tests.cases.manager_cases import BACKENDS, COLLECTIVE

RANK_MAJOR = {"layout": "rank_major"}
TWO_NODES = {"gpu_per_node": 2}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_backends_give_the_same_result(ranks: Any, world_size: int, backend: str) -> None:
    ranks(cases.layer_on_a_manager, world_size, backend, {})


@pytest.mark.parametrize("backend", COLLECTIVE)
@pytest.mark.parametrize("dtype", [torch.float32, FP8_DTYPE], ids=str)
def test_tokens_of_another_dtype(ranks: Any, dtype: torch.dtype, backend: str) -> None:
    ranks(cases.layer_on_a_manager, 3, backend, {}, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_without_rank_0(ranks: Any, backend: str) -> None:
    ranks(cases.in_a_group_without_rank_0, 4, backend)


@pytest.mark.parametrize(
    "changes", [RANK_MAJOR, TWO_NODES, TWO_NODES | RANK_MAJOR], ids=lambda changes: "-".join(changes)
)
def test_any_layout_and_topology_gives_the_same_result(ranks: Any, changes: dict[str, Any]) -> None:
    ranks(cases.layer_on_a_manager, 4, "ep_a2a", changes)


@pytest.mark.parametrize("body", [cases.needs_a_living_handle, cases.steps_that_fail, cases.what_is_refused])
def test_the_default_backend(ranks: Any, body: Any) -> None:
    ranks(body, 3)


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_forms(ranks: Any, world_size: int) -> None:
    ranks(cases.other_forms, world_size)
