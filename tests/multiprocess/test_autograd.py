"""Gradients of exchanges on CPU processes, against dense layers."""

from pathlib import Path
from typing import Any

import pytest

from ep_a2a.testing.launch import RankFailure, RankPool
from tests.cases import autograd_cases as cases


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("layout", ["compact", "rank_major"])
def test_against_the_dense_layer(ranks: Any, world_size: int, layout: str) -> None:
    ranks(cases.dense, world_size, layout)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, "compact"), (2, "rank_major"), (4, "compact"), (5, "rank_major")]
)
def test_slots_have_equal_bits_at_any_ep_size(ranks: Any, world_size: int, layout: str) -> None:
    ranks(cases.slots, world_size, layout)


@pytest.mark.parametrize(("world_size", "frozen"), [(2, "inputs"), (2, "all"), (2, "none"), (4, "inputs"), (5, "none")])
def test_two_layers_and_an_unused_dispatch(ranks: Any, world_size: int, frozen: str) -> None:
    ranks(cases.several, world_size, frozen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(ranks: Any, reentrant: bool) -> None:
    ranks(cases.checkpointed, 2, reentrant)


@pytest.mark.parametrize(
    "body",
    [
        cases.rows_without_a_token,
        cases.halves,
        cases.skipped_experts,
        cases.another_order,
        cases.on_one_rank,
        cases.refusals,
        cases.operators,
        cases.compiled_first,
        cases.tagged,
    ],
)
def test_special(ranks: Any, body: Any) -> None:
    ranks(body, 2)


def test_a_rank_that_dies_before_backward_is_named(tmp_path: Path) -> None:
    with RankPool(2, timeout_secs=120, grace_secs=60) as pool, pytest.raises(RankFailure, match="exit code -9"):
        pool.run(cases.killed_before_backward, str(tmp_path))
    assert (tmp_path / "missing").read_text() == "(1,)"


@pytest.mark.parametrize(("quant", "combine_quant"), [("mxfp8", "none"), ("fp8_per_token", "fp8_blockwise")])
def test_casts_of_forward_only(ranks: Any, quant: str, combine_quant: str) -> None:
    ranks(cases.cast, 2, quant, combine_quant)


@pytest.mark.parametrize(("backend", "num_nodes"), [("ep_a2a", 2), ("naive", 1), ("allgather_reducescatter", 1)])
def test_another_backend(ranks: Any, backend: str, num_nodes: int) -> None:
    ranks(cases.on_another_backend, 2, backend, num_nodes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_in_one_graph(ranks: Any, backend: str, dynamic: bool) -> None:
    ranks(cases.compiled, 2, backend, dynamic)


def test_compiled_once(ranks: Any) -> None:
    ranks(cases.compiled_once, 2, "aot_eager")


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_graphs_repeat_no_exchange(ranks: Any, budget: float) -> None:
    ranks(cases.saved, 2, budget)
