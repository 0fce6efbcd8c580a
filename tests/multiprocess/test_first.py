"""Read this test first: one step of an op on two ranks, every number worked out by hand."""

from typing import Any

import torch

import ep_a2a
from ep_a2a.testing import RankContext


def one_step(context: RankContext) -> None:
    """What the process of each rank runs."""
    rank = context.rank
    # two tokens of hidden size 8: 0 and 1 on rank 0, 10 and 11 on rank 1. Each element of a token is its number
    tokens = torch.tensor([[10.0 * rank] * 8, [10.0 * rank + 1] * 8])
    # rank 0 owns experts 0 and 1, rank 1 owns 2 and 3: each first token goes to both ranks, each second one to rank 1
    ids = torch.tensor([[0, 2], [3, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    with ep_a2a.make_op(context.group, hidden_size=8, num_experts=4, topk=2, max_tokens=2, dtype=torch.float32) as op:
        received = op.dispatch(tokens, weights, None, ids)

        # rows lie by rank, and behind them is padding
        num_rows = 2 if rank == 0 else 4
        came = [0.0, 10.0] if rank == 0 else [0.0, 1.0, 10.0, 11.0]
        assert int(received.total_recv) == num_rows
        assert received.tokens[:num_rows].tolist() == [[number] * 8 for number in came]
        # each with its experts and weights
        assert received.indices[:num_rows].tolist() == ([[0, 2]] * 2 if rank == 0 else [[0, 2], [3, 2]] * 2)
        assert received.weights[0].tolist() == [0.75, 0.25]
        assert received.weights[num_rows - 1].tolist() == ([0.75, 0.25] if rank == 0 else [0.5, 0.5])

        # expert e multiplies by e + 1; each rank adds up what its own experts make of a token, by weight
        is_own = received.indices // 2 == rank
        factors = (received.weights * (received.indices + 1) * is_own).sum(1, keepdim=True)
        combined = op.combine(received.tokens * factors, None, ids).tokens

        # the first token's factor is 0.75 * 1 + 0.25 * 3 = 1.5, the second one's 0.5 * 4 + 0.5 * 3 = 3.5
        assert combined.tolist() == [[1.5 * 10 * rank] * 8, [3.5 * (10 * rank + 1)] * 8]


def test_one_step(ranks: Any) -> None:
    # the fixture is in tests/conftest.py: it starts two processes and calls the function in both
    ranks(one_step, 2)
