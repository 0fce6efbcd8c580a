"""All backends on CPU processes: those that can run here, by their capabilities; the others say why not."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_a2a.errors import AlternationError, ClosedError, ForeignIndicesError, UnsupportedError
from ep_a2a.managers.external.library import Library
from ep_a2a.managers.external.mori import LIBRARY as MORI
from ep_a2a.managers.external.mori import MoriAll2AllManager
from ep_a2a.managers.registry import create_manager
from ep_a2a.testing import RankContext, run_ranks
from tests.cases import parity_cases
from tests.cases.parity_cases import pairs, reason_against
from tests.messages import messages_of

HIDDEN_DIM = 32
WORLD_SIZE = 2


@pytest.mark.parametrize(("name", "layout"), pairs())
def test_parity(ranks: Any, name: str, layout: str) -> None:
    reason = reason_against(name, layout, "cpu")
    if reason is not None:
        pytest.skip(reason)
    ranks(parity_cases.run_backend, WORLD_SIZE, name, layout, HIDDEN_DIM)


class MoriInterfaceManager(MoriAll2AllManager):
    """MORI's manager on this package, which has MORI's names: nothing here stands for a GPU library, it really runs."""

    library = Library("ep_a2a", "ep-a2a", "", needs=MORI.needs)
    capabilities = replace(MoriAll2AllManager.capabilities, runs_on_cpu=True)


def moris_manager_on_moris_interface(context: RankContext) -> None:
    # not the last step: MORI's combine takes fewer rows than its dispatch has returned, this package's op does not
    parity_cases.run_manager(context, MoriInterfaceManager(context.group), "compact", HIDDEN_DIM, num_steps=2)
    manager = MoriInterfaceManager(context.group)
    manager.device = context.device
    kwargs = parity_cases.handle_kwargs(context, "compact", HIDDEN_DIM)
    with pytest.raises(UnsupportedError, match="layout out of compact, which is what backend 'mori' can do"):
        manager.get_handle({**kwargs, "layout": "rank_major"})
    op = manager.get_handle(kwargs)
    x, weights, ids = torch.zeros(2, HIDDEN_DIM, dtype=torch.bfloat16), torch.ones(2, 2), torch.zeros(2, 2).int()
    with pytest.raises(AlternationError):
        op.combine(x, None, None)
    rows = op.dispatch(x, weights, None, ids)[0]
    with pytest.raises(ForeignIndicesError):
        op.combine(rows, None, ids + 1)
    with pytest.raises(UnsupportedError, match="counts of received rows by source"):
        _ = op.recv_counts
    op.reset()
    assert not op.has_open_step
    rows = op.dispatch(x, weights, None, ids)[0]
    buffer = op.get_registered_combine_input_buffer(torch.bfloat16)
    buffer.zero_()
    assert not op.combine(buffer, None, ids.clone())[0][:2].any()
    with pytest.raises(UnsupportedError, match="waits that this package bounds"):
        op.set_timeout(1.0)
    manager.destroy()
    with pytest.raises(ClosedError):
        op.check()


def arguments_without_effect(context: RankContext) -> None:
    x, weights, ids = torch.zeros(2, HIDDEN_DIM, dtype=torch.bfloat16), torch.ones(2, 2), torch.zeros(2, 2).int()
    kwargs = parity_cases.handle_kwargs(context, "compact", HIDDEN_DIM)
    with messages_of(logging.getLogger("ep_a2a.ops.adapter")) as said:
        for name in ("naive", "mori"):
            manager = MoriInterfaceManager(context.group) if name == "mori" else create_manager(name, context.group)
            manager.device = context.device
            manager.get_handle(kwargs)
            assert said == []
            for max_sms in (8, 16):
                op = manager.get_handle({**kwargs, "max_sms": max_sms, "timeout_secs": 50.0, "launch": "manual"})
                rows = op.dispatch(x, weights, None, ids, warp_per_block=4)[0]
                op.combine(rows, None, ids, block_num=8)
                op.set_max_sms(0)
                op.set_max_sms(4)
            takes = {
                "naive": "CollectiveDispatchCombineOp: launch, max_sms",
                "mori": "MoriOp: timeout_secs, launch, max_sms",
            }
            start, end = "without effect on ", "; the backend 'ep_a2a' goes by them"
            assert [each.removeprefix(start).removesuffix(end) for each in said] == [
                takes[name],
                f"{takes[name].partition(':')[0]}: block_num, rdma_block_num and warp_per_block of calls",
                f"{takes[name].partition(':')[0]}: set_max_sms",
            ]
            said.clear()
            manager.destroy()


def test_what_is_without_effect_is_said_once() -> None:
    run_ranks(arguments_without_effect, WORLD_SIZE)


def test_moris_manager_on_moris_interface() -> None:
    run_ranks(moris_manager_on_moris_interface, WORLD_SIZE)
