"""What MORI's combine takes: own ids and weights pass, others are dropped with one warning each."""

import logging
from types import SimpleNamespace

import pytest
import torch

from ep_a2a.compat.mori.combine_input import CombineInput
from ep_a2a.compat.parameters import warn_once
from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import InputError
from ep_a2a.interface import DispatchResult
from ep_a2a.memory.guards import recording_on_cpu

TOPK, NUM_TOKENS, NUM_RECEIVED, NUM_ROWS = 2, 3, 5, 16
CONFIG = EpDispatchCombineConfig(torch.float32, 0, 2, 32, 0, 0, 4, 8, 2, TOPK)


def open_step():
    """A step between its dispatch and its combine."""
    weights, ids = torch.ones(NUM_ROWS, TOPK), torch.zeros(NUM_ROWS, TOPK, dtype=torch.int32)
    total = torch.tensor([NUM_RECEIVED], dtype=torch.int32)
    result = DispatchResult(torch.ones(NUM_ROWS, 32), weights, None, ids, total)
    return SimpleNamespace(next_call="combine", num_tokens=NUM_TOKENS, dispatched=result)


@pytest.fixture
def step():
    warn_once.cache_clear()
    return open_step()


@pytest.fixture
def given(step):
    made = CombineInput(SimpleNamespace(device=torch.device("cpu"), open_step=step), CONFIG, {})
    made.own_weights = torch.ones(NUM_TOKENS, TOPK)
    return made


def own_ids():
    return torch.zeros(NUM_TOKENS, TOPK, dtype=torch.int32)


def test_what_fits_passes(given, step, caplog):
    rows, weights, ids = step.dispatched[0], step.dispatched[1], own_ids()
    for got, expected in zip(given.of(rows, weights, ids, 1), (rows, weights, ids), strict=True):
        assert got is expected
    assert given.of(rows, None, None, 1) == (rows, None, None)
    assert not caplog.records


def test_one_warning_each(given, step, caplog):
    rows, received_ids = step.dispatched[0], step.dispatched[3]
    with caplog.at_level(logging.WARNING):
        for own_weights in (given.own_weights, given.own_weights.clone()):
            assert given.of(rows, own_weights, own_ids(), 1)[1] is None
        for other_ids in (received_ids, received_ids.clone(), received_ids[:NUM_RECEIVED]):
            assert given.of(rows, None, other_ids, 1)[2] is None
        assert given.of(rows[:NUM_RECEIVED], None, received_ids[:NUM_RECEIVED].clone(), 1)[2] is None
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "no use of weights" in texts[0]
    assert "no use of indices" in texts[1]


@pytest.fixture
def as_many_rows(step):
    """As many rows as this rank has tokens: by shape alone weights could be in the order of either."""
    step.dispatched[4].fill_(NUM_TOKENS)
    step.dispatched[1].copy_(torch.arange(NUM_ROWS * TOPK).view(NUM_ROWS, TOPK))
    # what nobody has written
    step.dispatched[1][NUM_TOKENS - 1] = torch.nan
    return step.dispatched[0][:NUM_TOKENS]


@pytest.mark.parametrize("copied", [False, True])
def test_own_weights_are_dropped_also_where_as_many_rows_are_given(given, step, as_many_rows, copied):
    own, received = given.own_weights, step.dispatched[1][:NUM_TOKENS]
    if copied:
        own, received = own.clone(), received.clone()
    assert given.of(as_many_rows, own, None, 1)[1] is None
    summed = given.of(as_many_rows, received, None, 1)[1][:NUM_TOKENS]
    assert torch.equal(summed.view(torch.int32), received.view(torch.int32))


def test_weights_that_could_be_in_either_order_are_refused(given, step, as_many_rows):
    for weights in (2 * given.own_weights, step.dispatched[1][1 : NUM_TOKENS + 1]):
        with pytest.raises(InputError, match=f"others for {NUM_TOKENS} rows, as many as this rank has tokens"):
            given.of(as_many_rows, weights, None, 1)
    with recording_on_cpu(), pytest.raises(InputError, match="could be in the order of either"):
        given.of(as_many_rows, given.own_weights.clone(), None, 1)
    own, given.own_weights = given.own_weights, None
    with pytest.raises(InputError, match="could be in the order of either"):
        given.of(as_many_rows, own, None, 1)


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize(
    ("num_given", "own", "shape", "travel"),
    [
        (0, False, (0, TOPK), True),  # cut to what this rank has received: nothing, beside others that bring weights
        (0, True, (0, TOPK), False),  # its own, of no tokens, which other ranks drop, too
        (0, False, (0,), False),
        (NUM_ROWS, False, (0, TOPK), False),
    ],
)
def test_empty_weights(given, step, registered, num_given, own, shape, travel):
    weights = torch.empty(shape)
    step.dispatched[4].fill_(0)
    given.own_weights, step.num_tokens = weights if own else torch.empty(0, TOPK), 0
    if registered:
        given._registered[torch.float32] = SimpleNamespace(rows=step.dispatched[0])
    got = given.of(step.dispatched[0][:num_given], weights, None, int(not registered))[1]
    assert (None if got is None else got.shape) == ((NUM_ROWS, TOPK) if travel else None)


def test_a_backend_may_register_other_memory_in_each_step():
    """As FlashInfer's does."""
    native = SimpleNamespace(
        device=torch.device("cpu"),
        open_step=None,
        get_registered_combine_input_buffer=lambda dtype, _: torch.empty(NUM_ROWS, 32, dtype=dtype),
    )
    made = CombineInput(native, CONFIG, {})
    for _ in range(2):
        buffer = made.registered(torch.float32, -1)
        assert made.of(torch.ones(NUM_ROWS, 32), None, None, 0)[0] is buffer
