"""What an engine's adapters share, beside an op that is stood in for."""

from types import SimpleNamespace

import pytest
import torch

from ep_a2a.errors import TooManyTokensError, UnsupportedError
from ep_a2a.integrations.dispatcher import Dispatcher
from ep_a2a.integrations.manager import EngineManager
from ep_a2a.integrations.token_format import agreed_bounds

HIDDEN = 8


class Op:
    """Returns what it is given: its own tokens, as one rank's op does, and the experts' rows as sums."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(hidden_dim=HIDDEN)

    def combine(self, rows, weights, indices, *, out):
        return out.copy_(rows), None


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher(Op())


def test_inputs_are_of_the_ops_types(dispatcher):
    """Columns that are missing become zeros; what fits is not copied."""
    fits = torch.ones(3, HIDDEN), torch.rand(3, 2), torch.ones(3, 2, dtype=torch.int32)
    assert dispatcher.fitted(*fits) == fits
    tokens, weights, ids = fitted = dispatcher.fitted(
        torch.ones(2, 3, 5)[:, 0], torch.ones(2, 3).bfloat16()[:, 1:], torch.tensor([[1, 1], [1, 2**32 + 3]])
    )
    assert tokens.tolist() == [[1.0] * 5 + [0.0] * 3] * 2
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    # an id that no int32 holds stays a dropped slot
    assert ids.tolist() == [[1, 1], [1, 2**31 - 1]]
    assert all(each.is_contiguous() for each in fitted)
    weighted, *_ = dispatcher.fitted(fits[0], fits[1][:, :1], fits[2][:, :1], weights_on_input=True)
    assert torch.equal(weighted[:, :1], fits[1][:, :1])
    with pytest.raises(UnsupportedError, match="one expert per token"):
        dispatcher.fitted(*fits, weights_on_input=True)


@pytest.mark.parametrize("width", [5, HIDDEN])
def test_rows_and_results_may_be_narrower_than_the_op(dispatcher, width):
    rows, out = torch.rand(4, 5), torch.full((4, width), 7.0)
    assert dispatcher.combine(rows, out) is out
    assert torch.equal(out[:, :5], rows)
    assert not out[:, 5:].any()


def test_a_layer_keeps_its_number():
    """Also when it is built again, with other weights: its dispatches carry the number."""
    manager = EngineManager.__new__(EngineManager)
    manager._layers = []
    layers = [SimpleNamespace() for _ in range(3)]
    assert [manager.layer_number(layer) for layer in (*layers, layers[0])] == [1, 2, 3, 1]


def test_the_bounds_of_a_step():
    """One for all ranks where it serves all, else one per rank, each replica's share for each rank that shares it."""
    told = {(None, 1): 16, ((0, 0), 1): 1, ((7,), 1): 7, ((7, 7), 2): 4, ((32, 31), 2): 16}
    told |= {((7, 0), 1): (7, 0), ((40, 1), 4): (10, 10, 10, 10, 1, 1, 1, 1)}
    assert {given: agreed_bounds(*given, 16, "--o") for given in told} == told
    with pytest.raises(TooManyTokensError, match="17") as caught:
        agreed_bounds((1, 33), 2, 16, "--max-tokens")
    assert "--max-tokens" in str(caught.value)
