"""Which physical experts tokens go to after ranks are gone, and what cannot go on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep_a2a.errors import ConfigError, InputError, RankTimeoutError
from ep_a2a.parallel import survivors as module
from ep_a2a.parallel.survivors import Survivors, survivors


def left_with(experts: tuple[int, ...], lost: tuple[int, ...] = ()) -> Survivors:
    nobody: Any = None
    return Survivors((0, 2), nobody, nobody, experts, lost)


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=12), st.data())
def test_every_id_goes_to_a_copy_of_its_expert_or_nowhere(experts: list[int], data: st.DataObject) -> None:
    lost = tuple(sorted(set(range(6)) - set(experts)))
    ids = torch.tensor(data.draw(st.lists(st.lists(st.integers(-1, 5), min_size=2, max_size=2), max_size=6)))
    ids = ids.reshape(-1, 2).int()
    found = left_with(tuple(experts), lost).physical_ids(ids)
    assert (found.shape, found.dtype) == (ids.shape, ids.dtype)
    for logical, physical in zip(ids.flatten().tolist(), found.flatten().tolist()):
        if logical < 0 or logical in lost:
            assert physical == -1
        else:
            assert experts[physical] == logical


def test_copies_take_turns() -> None:
    found = left_with((7, 3, 7, 7), (5,)).physical_ids(torch.tensor([[7, 3], [7, 5], [7, -1], [7, 7]]))
    assert found.tolist() == [[0, 1], [2, -1], [3, -1], [0, 0]]


def test_ids_that_nobody_held_go_nowhere() -> None:
    found = left_with((1, 0), ()).physical_ids(torch.tensor([[0, 2, 99, -5]]))
    assert found.tolist() == [[1, -1, -1, -1]]
    # more logical experts than the dtype can number
    narrow = torch.tensor([[-1, 1]], dtype=torch.int8)
    assert left_with((1,), (300,)).physical_ids(narrow).tolist() == [[-1, 0]]
    assert left_with((), ()).physical_ids(torch.tensor([[0, -1]])).tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.zeros(1, 1, dtype=torch.int8), "a dtype that holds -1 to 299"),
        (torch.zeros(1, 1, dtype=torch.uint8), "torch.uint8"),
        (torch.zeros(1, 1), "torch.float32"),
        (torch.zeros(2, dtype=torch.int64), r"\[tokens, topk\]; got shape \[2\]"),
    ],
)
def test_ids_that_cannot_be_replaced_are_refused(ids: torch.Tensor, said: str) -> None:
    with pytest.raises(InputError, match=said):
        left_with(tuple(range(300)), ()).physical_ids(ids)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The manager of rank 1 of three."""
    monkeypatch.setattr(module, "dist", SimpleNamespace(get_world_size=lambda _: 3, get_rank=lambda _: 1))
    monkeypatch.setattr(module, "make_subgroup", lambda *_, **__: None)
    monkeypatch.setattr(module, "create_manager", lambda *_: SimpleNamespace())
    return SimpleNamespace(cpu_group=None, backend="ep_a2a", device="cpu")


def test_experts_may_be_a_tensor(manager: Any) -> None:
    left = survivors(RankTimeoutError("x", "y", missing_ranks=(2,)), manager, torch.tensor([[0, 1], [1, 0], [2, 0]]))
    assert (left.experts, left.lost_experts) == ((0, 1, 1, 0), (2,))


def test_an_error_of_the_meeting_names_all_that_are_gone(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_comes(*_: Any, **__: Any) -> None:
        raise RankTimeoutError("x", "y", missing_ranks=(0,))

    monkeypatch.setattr(module, "make_subgroup", nobody_comes)
    with pytest.raises(RankTimeoutError) as caught:
        survivors(RankTimeoutError("x", "y", missing_ranks=(2,)), manager, [[0], [1], [2]])
    assert caught.value.missing_ranks == (0, 2)


@pytest.mark.parametrize(
    ("missing", "experts", "said"),
    [
        ((), [[0], [1], [2]], "names who is gone"),
        ((1, 2), [[0], [1], [2]], "this rank not among them"),
        ((3,), [[0], [1], [2]], "an error of this group of 3 ranks"),
        ((2,), [[0], [1.5], [2]], "a list of integers"),
        ((2,), [0, 1, 2], "a list of integers"),
        ((2,), [[0], [1]], "of each of 3 ranks"),
        ((2,), [[0], [1], [2, 3]], "equally many"),
    ],
)
def test_what_cannot_go_on_is_refused_before_anybody_meets(
    manager: Any, missing: tuple[int, ...], experts: list[list[int]], said: str
) -> None:
    error = RankTimeoutError("x", "y", missing_ranks=missing, late_ranks=(0,))
    with pytest.raises(ConfigError, match=said):
        survivors(error, manager, experts)
