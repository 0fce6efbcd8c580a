"""Read this test first: one step of an op on two ranks, every number worked out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import ep_a2a

if TYPE_CHECKING:
    from ep_a2a.testing import RankContext


def one_step(context: RankContext) -> None:
    rank = context.rank
    # rank 0 owns experts 0 and 1, rank 1 owns 2 and 3; expert e multiplies its rows by e + 1
    ids = torch.tensor([[0, 2], [3, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    tokens = torch.tensor([[10.0 * rank] * 8, [10.0 * rank + 1] * 8])
    with ep_a2a.make_op(context.group, hidden_size=8, num_experts=4, topk=2, max_tokens=2, dtype=torch.float32) as op:
        received = op.dispatch(tokens, weights, None, ids)

        # token 0 of each rank names an expert of either rank, token 1 only experts of rank 1
        assert int(received.total_recv) == (2, 4)[rank]
        assert received.tokens[: int(received.total_recv), 0].tolist() == ([0, 10], [0, 1, 10, 11])[rank]
        last = int(received.total_recv) - 1
        assert received.tokens[last].tolist() == [(10.0, 11.0)[rank]] * 8
        assert received.indices[last].tolist() == ([0, 2], [3, 2])[rank]
        assert received.weights is not None
        assert received.weights[last].tolist() == ([0.75, 0.25], [0.5, 0.5])[rank]

        is_own = received.indices // 2 == rank
        factors = (received.weights * (received.indices + 1) * is_own).sum(1, keepdim=True)
        combined = op.combine(received.tokens * factors, None, ids).tokens

        # 0.75 * 1 + 0.25 * 3 = 1.5 and 0.5 * 4 + 0.5 * 3 = 3.5
        assert combined.tolist() == [[1.5 * 10 * rank] * 8, [3.5 * (10 * rank + 1)] * 8]


def test_one_step(ranks: Any) -> None:
    ranks(one_step, 2)
