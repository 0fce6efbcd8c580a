"""Slots without an expert on libraries whose kernels want one in every slot."""

import functools
import sys
from typing import Any
from unittest import mock

import pytest
import torch

from ep_a2a.commands.bench.libraries import FlashInferRoundTrip
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.errors import UnsupportedError
from ep_a2a.testing import RankContext, run_ranks
from tests.cases import parity_cases
from tests.library_stand_ins import (
    FlashInferOneSidedManager,
    FlashInferTwoSidedManager,
    MoriLowLatencyManager,
    NVLinkAlltoAll,
    NVLinkOneSidedAlltoAll072,
    PplxManager,
    flashinfer_modules,
)

WORLD_SIZE = 2
HIDDEN_DIM, PPLX_HIDDEN_DIM = 32, 512
NUM_EXPERTS = WORLD_SIZE * parity_cases.EXPERTS_PER_RANK


def pplx_parity(context: RankContext) -> None:
    parity_cases.run_manager(context, PplxManager(context.group), "expert_major", PPLX_HIDDEN_DIM)
    # a token whose slots all name no expert; ids past the last expert
    manager = PplxManager(context.group)
    manager.device = context.device
    kwargs = parity_cases.handle_kwargs(context, "expert_major", PPLX_HIDDEN_DIM)
    op = manager.get_handle(kwargs)
    x = torch.ones(3, PPLX_HIDDEN_DIM, dtype=torch.bfloat16)
    ids = torch.tensor([[-1, NUM_EXPERTS], [4, -7], [1, 4]], dtype=torch.int32)
    rows = op.dispatch(x, torch.full((3, 2), 0.5), None, ids)[0]
    result, _ = op.combine(rows, None, ids)
    assert result[:3, 0].tolist() == [0.0, 0.5, 1.0]
    # a bias that is `out`, and one that is the result of the step before
    rows = op.dispatch(x, torch.full((3, 2), 0.5), None, ids)[0]
    out = torch.ones(3, PPLX_HIDDEN_DIM, dtype=torch.bfloat16)
    assert op.combine(rows, None, ids, out=out, bias_0=out, bias_1=result[:3])[0][:, 0].tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(UnsupportedError, match="num_experts_per_token of at most 8, as a token's experts must differ"):
        manager.get_handle({**kwargs, "num_experts_per_token": 9})
    manager.destroy()


def test_pplx_gets_an_expert_of_weight_0() -> None:
    run_ranks(pplx_parity, WORLD_SIZE)


def mori_low_latency_between_nodes(context: RankContext, *, has_weights: bool) -> None:
    manager = MoriLowLatencyManager(context.group)
    manager.device = context.device
    kwargs: dict[str, Any] = parity_cases.handle_kwargs(context, "compact", HIDDEN_DIM) | {"gpu_per_node": 1}
    op = manager.get_handle(kwargs)
    assert op.config.kernel_type.name == "InterNodeV1LL"
    other = 4 * (1 - context.rank)
    ids = torch.tensor([[other, -1], [-1, -1], [NUM_EXPERTS, other + 1], [1, 4], [-1, other]], dtype=torch.int32)
    x = (torch.arange(5)[:, None] + 8 * context.rank).expand(-1, HIDDEN_DIM).to(torch.bfloat16).contiguous()
    weights = torch.tensor([[0.5, 9.0], [9.0, 9.0], [9.0, 2.0], [0.25, 1.0], [torch.inf, 1.0]])
    got, came_weights, _, came_ids, total = op.dispatch(
        x, weights if has_weights else None, None, ids, call_local_expert_count=True
    )
    # four rows of the other rank, one of this one, and the row without ids
    assert total.tolist() == [6]
    first = 4 * context.rank
    expected = {
        (8 * (1 - context.rank), (first, -1)),
        (8 * (1 - context.rank) + 2, (-1, first + 1)),
        (8 * (1 - context.rank) + 3, (1, 4)),
        (8 * (1 - context.rank) + 4, (-1, first)),
        (8 * context.rank + 3, (1, 4)),
        (8 * context.rank + 1, (-1, -1)),
    }
    assert {(int(row[0]), tuple(each)) for row, each in zip(got[:6], came_ids[:6].tolist(), strict=True)} == expected
    assert bool((came_ids[6:] == -1).all())
    assert op.local_expert_count.sum() == 5
    valid = came_ids >= 0
    if has_weights:
        assert sorted(came_weights[:6][valid[:6]].tolist()) == [0.25, 0.25, 0.5, 1.0, 1.0, 1.0, 2.0]
        assert not bool(came_weights[:6][~valid[:6]].any())
    else:
        assert came_weights is None
    # a row without ids holds anything
    rows = torch.where(valid.any(1, keepdim=True), got, torch.nan)
    result, _ = op.combine(rows, None, ids)
    multiplied = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0])
    assert torch.equal(result[:5], x * multiplied[:, None].to(x.dtype))
    manager.destroy()


@pytest.mark.parametrize("has_weights", [True, False])
def test_mori_low_latency_between_nodes_gets_an_expert_of_the_same_rank(has_weights: bool) -> None:
    run_ranks(functools.partial(mori_low_latency_between_nodes, has_weights=has_weights), WORLD_SIZE)


def flashinfer_parity(context: RankContext, *, layout: str, one_sided: type[NVLinkAlltoAll]) -> None:
    kind = FlashInferTwoSidedManager if layout == "compact" else FlashInferOneSidedManager
    with mock.patch.dict(sys.modules, flashinfer_modules(one_sided)), mock.patch("torch.cuda.synchronize"):
        parity_cases.run_manager(context, kind(context.group), layout, HIDDEN_DIM)
        # scales, no weights, a token whose slots all name no expert, rows that lie in the library's memory
        manager = kind(context.group)
        manager.device = context.device
        kwargs = parity_cases.handle_kwargs(context, layout, HIDDEN_DIM)
        op = manager.get_handle(kwargs | {"scale_dim": 4, "scale_type_size": 4})
        x = torch.arange(3.0)[:, None].expand(-1, HIDDEN_DIM).to(torch.bfloat16).contiguous()
        scales = x[:, :4].float() + context.rank
        ids = torch.tensor([[-1, NUM_EXPERTS], [4, -7], [1, 4]], dtype=torch.int32)
        rows, weights, received_scales, received_ids, _ = op.dispatch(x, None, scales, ids)
        assert weights is None
        valid = parity_cases.valid_rows(op, rows, received_ids)
        source = op.get_dispatch_src_token_pos() // (op.config.world_size * op.config.max_num_inp_token_per_rank)
        expected = rows.flatten(0, -2)[valid.flatten(), :4].float()
        if layout == "compact":
            expected += source[:, None]
            out = rows.clone()
        else:
            expected += valid.nonzero()[:, :1]
            out = op.get_registered_combine_input_buffer(torch.bfloat16)
            out.copy_(rows.flatten(0, 1))
        assert torch.equal(received_scales.flatten(0, -2)[valid.flatten()], expected)
        assert op.combine(out, None, ids)[0][:3, 0].tolist() == [0.0, 1.0, 4.0]
        manager.destroy()


@pytest.mark.parametrize(
    ("layout", "one_sided"),
    [("rank_major", NVLinkAlltoAll), ("rank_major", NVLinkOneSidedAlltoAll072), ("compact", NVLinkAlltoAll)],
)
def test_flashinfer_gets_an_expert_in_every_slot_or_a_rank_that_is_none(
    layout: str, one_sided: type[NVLinkAlltoAll]
) -> None:
    run_ranks(functools.partial(flashinfer_parity, layout=layout, one_sided=one_sided), WORLD_SIZE)


def flashinfer_round_trip(context: RankContext, *, changes: dict[str, Any], one_sided: type[NVLinkAlltoAll]) -> None:
    workload = Workload(WORLD_SIZE, 3, 512, 2, NUM_EXPERTS, **changes)
    with (
        mock.patch.dict(sys.modules, flashinfer_modules(one_sided)),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("importlib.metadata.version", return_value="0"),
    ):
        session = FlashInferRoundTrip(workload, context)
        session.check()
        received = session.received(session.dispatch())
        assert received.rows.shape == (WORLD_SIZE * 3, 512)
        session.combine(received)
        session.close()


@pytest.mark.parametrize("changes", [{}, {"quant": "fp8_per_1x128"}, {"combine_quant": "fp8_direct_cast"}], ids=str)
@pytest.mark.parametrize("one_sided", [NVLinkAlltoAll, NVLinkOneSidedAlltoAll072])
def test_the_benchs_calls_of_flashinfer_move_the_rows(one_sided: type[NVLinkAlltoAll], changes: dict[str, Any]) -> None:
    run_ranks(functools.partial(flashinfer_round_trip, changes=changes, one_sided=one_sided), WORLD_SIZE)
