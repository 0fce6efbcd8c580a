"""The clauses of docs/batch_invariance.md that no other test holds: a token's bits, whatever travels beside it."""

from typing import Any

import pytest
import torch

import ep_a2a
from ep_a2a.quantization import dequantize
from ep_a2a.testing import RankContext

NUM_EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 8, 2, 128, 140
PLACES = [0, 57, 138]
"""Of the tokens that are compared, in the large batch."""
SPREAD, NEAR = [0, 7], [0, 3]
"""Experts of different ranks with 2 and with 4 ranks; of the same rank with 2 ranks only."""


def batch(num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(num_tokens, TOPK, generator=generator)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOPK].int()
    return tokens, weights, ids


def experts(received: Any, op: Any, rank: int) -> torch.Tensor:
    """Expert e multiplies by e + 1; slots are weighed and added in float32, as combine of expert_major does."""
    per_rank = NUM_EXPERTS // op.config.world_size
    rows = received.tokens.float()
    if received.scales is not None:
        shape = received.tokens.shape
        scales = received.scales.flatten(0, -2)
        rows = (
            dequantize(received.tokens.reshape(-1, HIDDEN), scales, op.config.dispatch_quant_type).float().view(shape)
        )
    if op.config.layout == "expert_major":
        factors = torch.arange(per_rank) + per_rank * rank + 1
        return (rows * factors[:, None, None]).bfloat16()
    total = torch.zeros_like(rows)
    for slot in range(TOPK):
        ids = received.indices[..., slot, None]
        row = (rows * (ids + 1)).bfloat16().float()
        total += torch.where(ids // per_rank == rank, received.weights[..., slot, None] * row, 0.0)
    return total.bfloat16()


def step(op: Any, rank: int, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], most: int) -> torch.Tensor:
    tokens, weights, ids = given
    received = op.dispatch(tokens, weights, None, ids, step_tokens=most)
    return op.combine(experts(received, op, rank), None, ids).tokens[: len(tokens)].clone()


def alone_and_in_a_crowd(context: RankContext, quant: str) -> None:
    """Low-latency and bulk dispatch of the same tokens, in every layout: the same bits."""
    few = batch(len(PLACES), context.rank)
    crowd = batch(MAX_TOKENS - context.rank, 10 + context.rank)
    for own, others in zip(few, crowd):
        others[PLACES] = own
    results = []
    for layout in ("compact", "rank_major", "expert_major"):
        sizes = {"hidden_size": HIDDEN, "num_experts": NUM_EXPERTS, "topk": TOPK, "max_tokens": MAX_TOKENS}
        with ep_a2a.make_op(context.group, **sizes, quant=quant, layout=layout) as op:
            results.append(step(op, context.rank, few, len(PLACES)))
            results.append(step(op, context.rank, crowd, MAX_TOKENS)[PLACES])
    assert results[0].any()
    for each in results[1:]:
        assert torch.equal(each, results[0])


@pytest.mark.parametrize("quant", ["none", "fp8_per_token", "fp8_per_1x128"])
def test_a_token_has_the_same_bits_in_any_batch_and_layout(ranks: Any, quant: str) -> None:
    ranks(alone_and_in_a_crowd, 2, quant)


def with_experts(context: RankContext, chosen: list[int]) -> torch.Tensor:
    tokens, weights, ids = batch(4, 0)
    ids[:] = torch.tensor(chosen)
    sizes = {"hidden_size": HIDDEN, "num_experts": NUM_EXPERTS, "topk": TOPK, "max_tokens": 4}
    with ep_a2a.make_op(context.group, **sizes) as op:
        return step(op, context.rank, (tokens, weights, ids), 4)


def test_ranks_that_share_experts_otherwise_change_bits(ranks: Any) -> None:
    """A rank rounds the sum of its own experts. Experts that share no rank are added in the same order."""
    found = {(size, *chosen): ranks(with_experts, size, chosen)[0] for size in (2, 4) for chosen in (SPREAD, NEAR)}
    assert torch.equal(found[2, *SPREAD], found[4, *SPREAD])
    assert not torch.equal(found[2, *NEAR], found[4, *NEAR])
