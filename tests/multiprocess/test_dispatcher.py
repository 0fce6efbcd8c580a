"""An engine's manager on two CPU ranks: what it says of its ops, and of a rank that is gone."""

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
from ep_a2a.testing import RankContext, RankFailure, RankPool

HIDDEN, TOPK, NUM_EXPERTS, MAX_TOKENS = 128, 2, 7, 140


def one_layer(context: RankContext, token_format: TokenFormat) -> tuple[EngineManager, Dispatcher]:
    manager = EngineManager(context.group)
    manager.device = context.device
    owned = num_owned_experts(NUM_EXPERTS, 2, context.rank)
    shape = LayerShape(torch.bfloat16, HIDDEN, TOPK, NUM_EXPERTS, owned, MAX_TOKENS)
    (dispatcher,) = manager.dispatchers(object(), token_format, shape)
    return manager, dispatcher


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
