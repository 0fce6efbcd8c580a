"""What MORI's combine takes: own ids and weights pass, others are dropped with one warning each."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from ep_a2a.compat.mori.combine_input import CombineInput, Dispatched, LostRows
from ep_a2a.compat.parameters import warn_once
from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import InputError
from ep_a2a.interface import DispatchResult

TOPK, NUM_TOKENS, NUM_RECEIVED, NUM_ROWS = 2, 3, 5, 16
CONFIG = EpDispatchCombineConfig(torch.float32, 0, 2, 32, 0, 0, 4, 8, 2, TOPK)


@pytest.fixture
def dispatched():
    warn_once.cache_clear()
    result = DispatchResult(
        torch.ones(NUM_ROWS, 32),
        torch.ones(NUM_ROWS, TOPK),
        None,
        torch.zeros(NUM_ROWS, TOPK, dtype=torch.int32),
        torch.tensor([NUM_RECEIVED], dtype=torch.int32),
    )
    return Dispatched(torch.ones(NUM_TOKENS, TOPK), NUM_TOKENS, result)


@pytest.fixture
def given(dispatched):
    made = CombineInput(SimpleNamespace(device=torch.device("cpu")), CONFIG)
    made.dispatched = dispatched
    return made


def own_ids():
    return torch.zeros(NUM_TOKENS, TOPK, dtype=torch.int32)


def test_what_fits_passes(given, dispatched, caplog):
    rows, weights, ids = dispatched.result[0], dispatched.result[1], own_ids()
    for got, expected in zip(given.of(rows, weights, ids, 1), (rows, weights, ids), strict=True):
        assert got is expected
    assert given.of(rows, None, None, 1) == (rows, None, None)
    assert not caplog.records


def test_one_warning_each(given, dispatched, caplog):
    rows, received_ids = dispatched.result[0], dispatched.result[3]
    with caplog.at_level(logging.WARNING):
        for own_weights in (dispatched.weights, dispatched.weights.clone()):
            assert given.of(rows, own_weights, own_ids(), 1)[1] is None
        for other_ids in (received_ids, received_ids.clone(), received_ids[:NUM_RECEIVED]):
            assert given.of(rows, None, other_ids, 1)[2] is None
        assert given.of(rows[:NUM_RECEIVED], None, received_ids[:NUM_RECEIVED].clone(), 1)[2] is None
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "no use of weights" in texts[0]
    assert "no use of indices" in texts[1]


def test_own_weights_are_dropped_also_where_as_many_rows_are_given(given, dispatched):
    """T rows are given and T received: by shape alone the weights could be either."""
    dispatched.result[4].fill_(NUM_TOKENS)
    rows, weights = dispatched.result[0][:NUM_TOKENS], dispatched.result[1][:NUM_TOKENS]
    assert given.of(rows, dispatched.weights, None, 1)[1] is None
    assert torch.equal(given.of(rows, weights, None, 1)[1][:NUM_TOKENS], weights)


@pytest.mark.parametrize("num_given", [0, 1, NUM_TOKENS, NUM_RECEIVED - 1])
def test_rows_that_are_missing(given, dispatched, num_given):
    rows = dispatched.result[0]
    for _ in range(2):
        with pytest.raises(InputError, match=f"{NUM_RECEIVED - num_given} rows fewer"):
            given.of(rows[:num_given], None, None, 1)
    assert given.of(rows[:NUM_RECEIVED], None, None, 1)[0].shape == rows.shape


def test_a_gpu_tells_later():
    """The numbers as they stand once a GPU's copy has arrived."""
    lost = LostRows(torch.device("cpu"))
    lost.check()
    lost._on_host = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(InputError, match="3 rows fewer"):
        lost.check()
