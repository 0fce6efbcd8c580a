"""An engine's manager and dispatchers on two CPU ranks: words that travel with tokens."""

import logging
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ep_a2a import __version__
from ep_a2a.config import num_owned_experts
from ep_a2a.errors import RankTimeoutError
from ep_a2a.integrations.dispatcher import Dispatcher
from ep_a2a.integrations.manager import EngineManager, dead_ranks_named
from ep_a2a.integrations.token_format import LayerShape, TokenFormat
from ep_a2a.quantization import dequantize
from ep_a2a.routing import expert_ranges
from ep_a2a.testing import RankContext, RankFailure, RankPool

HIDDEN, TOPK, NUM_EXPERTS, NUM_WORDS, MAX_TOKENS = 128, 2, 7, 3, 140
TOKENS = ((5, 0), (3, 9), (6, 4))
BOUNDS = (5, 9, MAX_TOKENS)
"""Of each step; the last one is a bulk dispatch."""


def tokens_of(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Tokens, weights, ids, words. Words have all bits; a token's rows begin with its number."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    number = TOKENS[step][rank]
    tokens = torch.randn(number, HIDDEN, generator=generator).bfloat16()
    weights = torch.rand(number, TOPK, generator=generator)
    ids = torch.rand(number, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOPK]
    words = torch.randint(-(2**31), 2**31, (number, NUM_WORDS), generator=generator, dtype=torch.int32)
    # quiet and signalling NaN, infinity, zero below zero, a denormal
    special = torch.tensor([0x7FC00001, 0x7F800001, -0x400000, 0x7F800000, -(2**31), 1], dtype=torch.int32)
    words.view(-1)[: len(special)] = special[: words.numel()]
    return tokens, weights, ids, words


def one_layer(context: RankContext, token_format: TokenFormat) -> tuple[EngineManager, Dispatcher]:
    manager = EngineManager(context.group)
    manager.device = context.device
    owned = num_owned_experts(NUM_EXPERTS, 2, context.rank)
    shape = LayerShape(torch.bfloat16, HIDDEN, TOPK, NUM_EXPERTS, owned, MAX_TOKENS, NUM_WORDS)
    (dispatcher,) = manager.dispatchers(object(), token_format, shape)
    return manager, dispatcher


def words_travel(context: RankContext, cast: str) -> None:
    first, end = expert_ranges(NUM_EXPERTS, 2)[context.rank]
    manager, dispatcher = one_layer(context, TokenFormat(cast))
    for step, bound in enumerate(BOUNDS):
        tokens, weights, ids, words = tokens_of(step, context.rank)
        received = dispatcher.dispatch(dispatcher.inputs(tokens, weights, ids, words), max_num_tokens=bound)
        assert received.ids.shape == received.weights.shape == (2 * bound, TOPK)
        is_token = ((received.ids >= first) & (received.ids < end)).any(1)
        wanted = []
        for source in range(2):
            sent = tokens_of(step, source)
            here = ((sent[2] >= first) & (sent[2] < end)).any(1)
            wanted.append([each[here] for each in sent])
        for found, parts in zip((received.weights, received.ids, received.words), list(zip(*wanted))[1:]):
            assert torch.equal(found[is_token], torch.cat(parts).to(found.dtype))
        assert (received.words[~is_token] == -1).all()
        rows = received.rows
        if cast != "none":
            rows = dequantize(rows, received.scales, cast).bfloat16()
        local = (received.ids >= first) & (received.ids < end)
        sums = dispatcher.combine((rows.float() * (received.weights * local).sum(1, keepdim=True)).bfloat16())
        expected = tokens.float() * weights.sum(1, keepdim=True)
        torch.testing.assert_close(sums.float(), expected, rtol=7e-2, atol=7e-2)
    manager.check()
    manager.destroy()


@pytest.mark.parametrize("cast", ["none", "fp8_per_1x128"])
def test_words_travel_bit_by_bit(ranks, cast):
    ranks(words_travel, 2, cast)


def what_is_said(context: RankContext, token_format: TokenFormat) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    EngineManager.logger.addHandler(handler)
    EngineManager.logger.setLevel(logging.INFO)
    manager, _ = one_layer(context, token_format)
    manager.destroy()
    EngineManager.logger.removeHandler(handler)
    return lines


@pytest.mark.parametrize(
    ("token_format", "wire"),
    [
        (TokenFormat("fp8_per_1x128"), "as fp8_per_1x128;"),
        (TokenFormat("none", advice="try it"), "as bfloat16 (try it);"),
    ],
)
def test_the_first_rank_says_what_was_built(ranks, token_format, wire):
    (line,), others = ranks(what_is_said, 2, token_format)
    assert not others
    for part in (
        "ep_a2a: IntraNode kernels in Triton's interpreter (",
        "MiB of buffers",
        f"at most {MAX_TOKENS} tokens per rank, {wire}",
        "after warm-up 30 s",
        f"version {__version__}",
    ):
        assert part in line


def exchange_with_the_dead(context: RankContext, folder: str) -> None:
    manager, _ = one_layer(context, TokenFormat("none"))
    dist.barrier(context.group)
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankTimeoutError, match=r"rank 1 is gone.*Seen here: ") as caught, dead_ranks_named():
        dist.all_reduce(torch.zeros(1), group=context.group)
    assert caught.value.missing_ranks == manager.gone_ranks() == (1,)
    Path(folder, "named").touch()


def test_an_exchange_of_the_engine_names_a_rank_that_is_gone(tmp_path):
    with RankPool(2, grace_secs=30) as pool, pytest.raises(RankFailure) as caught:
        pool.run(exchange_with_the_dead, str(tmp_path))
    assert sorted(caught.value.tracebacks) == [1], str(caught.value)
    assert (tmp_path / "named").exists()
