"""Memory that cannot be had: each interface names the option or argument of its own that asks for less."""

import errno
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import ep_a2a
from ep_a2a.compat.aiter.managers import MoriAll2AllManager
from ep_a2a.errors import MAX_TOKENS, ConfigMismatchError, HostMemoryError
from ep_a2a.integrations.manager import EngineManager
from ep_a2a.integrations.token_format import RAW, LayerShape
from ep_a2a.memory import host_shm
from ep_a2a.memory.arena import Arena
from ep_a2a.testing import RankContext
from tests.cases import deep_ep_cases, low_latency_cases
from tests.cases.manager_cases import create, kwargs_of
from tests.cases.mori_programs import make_config, mori_world
from tests.cases.op_cases import Case

CASE = Case(world_size=2, tokens=((3, 5),))
TOKENS, IDS = torch.ones(1, CASE.hidden_dim).bfloat16(), torch.zeros(1, CASE.topk, dtype=torch.int64)


def by_manager(context: RankContext) -> None:
    with create("ep_a2a", context) as manager:
        manager.get_handle(kwargs_of(CASE, context.rank))


def by_aiter(context: RankContext) -> None:
    with MoriAll2AllManager(context.group) as manager:
        manager.device = context.device
        manager.get_handle(kwargs_of(CASE, context.rank))


def by_engine(context: RankContext) -> None:
    owned = CASE.num_experts // CASE.world_size
    shape = LayerShape(CASE.dtype, CASE.hidden_dim, CASE.topk, CASE.num_experts, owned, CASE.max_tokens)
    with EngineManager(context.group) as manager:
        manager.device, manager.tokens_option = context.device, "--engines-option"
        manager.dispatchers(object(), RAW, shape)


def by_make_op(context: RankContext) -> None:
    ep_a2a.make_op(hidden_size=CASE.hidden_dim, num_experts=CASE.num_experts, topk=CASE.topk, max_tokens=8)


def by_mori(context: RankContext) -> None:
    with mori_world(context) as mori:
        mori.ops.EpDispatchCombineOp(make_config(mori, context))


def by_deep_ep(context: RankContext) -> None:
    buffer = deep_ep_cases.make_buffer(context, CASE)
    try:
        buffer.low_latency_dispatch(TOKENS, IDS, 8, CASE.num_experts, use_fp8=False)
    finally:
        buffer.destroy()


def by_triton_distributed(context: RankContext) -> None:
    with Arena(context.group, context.device) as arena:
        low_latency_cases.make_layer(context, low_latency_cases.BASE, arena)


NAMES: dict[Callable[[RankContext], None], str] = {
    by_manager: MAX_TOKENS,
    by_aiter: "max_num_tokens_per_dp_rank",
    by_engine: "--engines-option",
    by_make_op: "max_tokens",
    by_mori: "max_num_inp_token_per_rank",
    by_deep_ep: "num_max_dispatch_tokens_per_rank",
    by_triton_distributed: "max_m",
}


def without_memory(context: RankContext, make: Callable[[RankContext], None]) -> str:
    """The error's text. Memory is full on rank 1 alone, and the other ranks are told."""
    full = OSError(errno.ENOSPC, "No space left")
    with (
        mock.patch.object(host_shm, "_create", side_effect=full if context.rank else None, wraps=host_shm._create),
        pytest.raises(HostMemoryError if context.rank else ConfigMismatchError) as caught,
    ):
        make(context)
    return str(caught.value)


@pytest.mark.parametrize("make", NAMES)
def test_the_option_that_asks_for_less_is_named(ranks, make):
    for text in ranks(without_memory, 2, make):
        assert f"or lower {NAMES[make]}." in text
