"""Inputs, byte counts and sweeps of the benchmark, against plain counting."""

import re
from typing import Any

import pytest
import torch

from ep_a2a.cli.bench import CONTENDER_NAMES
from ep_a2a.commands.bench.contenders import CONTENDERS
from ep_a2a.commands.measure.session import check_round_trip
from ep_a2a.commands.measure.workload import Workload, make_workloads
from ep_a2a.errors import CheckFailedError, EpA2AError
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.routing import ROUTINGS, expert_ranges


def workload_of(**changes: Any) -> Workload:
    return Workload(**{"ranks": 3, "tokens": 17, "hidden": 256, "topk": 3, "experts": 10} | changes)


def counted_rows(workload: Workload) -> tuple[list[int], list[int]]:
    """Rows that each rank sends to and receives from others, one token and one slot at a time."""
    ranges = expert_ranges(workload.experts, workload.ranks)
    sent, received = [0] * workload.ranks, [0] * workload.ranks
    for source in range(workload.ranks):
        for ids in workload.ids(source).tolist():
            owners = {rank for rank, (first, end) in enumerate(ranges) for i in ids if first <= i < end}
            for owner in owners - {source}:
                sent[source] += 1
                received[owner] += 1
    return sent, received


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_are_those_of_the_busiest_rank(routing):
    workload = workload_of(routing=routing)
    sent, received = counted_rows(workload)
    assert workload.busiest_remote_rows == max(*sent, *received)
    row = workload.as_row()
    assert row["dispatch_bytes"] == row["combine_bytes"] == row["remote_rows"] * 256 * 2


@pytest.mark.parametrize(
    ("quant", "combine_quant", "dispatch_bytes", "combine_bytes"),
    [
        ("none", "none", 14336, 14336),
        ("fp8_per_1x128", "none", 7168 + 56 * 4, 14336),
        ("fp8_per_token", "fp8_direct_cast", 7168 + 4, 7168),
        ("mxfp8", "none", 7168 + 224, 14336),
        ("fp8_per_1x128", "fp8_blockwise", 7392, 7392),
    ],
)
def test_a_row_is_its_elements_and_its_scales(quant, combine_quant, dispatch_bytes, combine_bytes):
    workload = workload_of(hidden=7168, quant=quant, combine_quant=combine_quant)
    assert (workload.dispatch_row_bytes, workload.combine_row_bytes) == (dispatch_bytes, combine_bytes)


def test_inputs_are_seeded_by_rank_and_seed():
    workload = workload_of()
    one, again = workload.inputs(0), workload.inputs(0)
    for name in ("x", "ids", "weights"):
        assert torch.equal(getattr(one, name), getattr(again, name))
        for other in (workload.inputs(1), workload_of(seed=2).inputs(0)):
            assert not torch.equal(getattr(one, name), getattr(other, name))
    assert one.ids.dtype == torch.int32
    torch.testing.assert_close(one.weights.sum(1), torch.ones(17))
    # a caller that writes into its ids must not change everybody's
    workload.ids(0).fill_(-1)
    assert torch.equal(one.ids, workload.ids(0))


@pytest.mark.parametrize("quant", ["none", "fp8_per_token", "fp8_per_1x128", "mxfp8"])
def test_the_check_takes_a_right_result_and_no_other(quant):
    workload = workload_of(quant=quant)
    x = workload.inputs(0).x
    copies = workload.num_distinct_ranks(0)
    rows = x if quant == "none" else dequantize(*quantize(x, quant), quant)
    right = (rows.float() * copies[:, None]).bfloat16()
    check_round_trip(workload, x, copies, right)
    for wrong in (right.roll(1, 0), right.roll(1, 1), right * 2, torch.full_like(right, float("nan"))):
        with pytest.raises(CheckFailedError, match="elements are off"):
            check_round_trip(workload, x, copies, wrong)
    one_element = right.clone()
    one_element[3, 7] += 1
    with pytest.raises(CheckFailedError, match="token 3, element 7"):
        check_round_trip(workload, x, copies, one_element)
    with pytest.raises(CheckFailedError, match=r"\(17, 256\)"):
        check_round_trip(workload, x, copies, right[:5])


def test_a_sweep_is_every_combination():
    points = make_workloads({"ranks": (2,), "layout": ("compact", "rank_major"), "tokens": (1, 4), "max_sms": (0, 8)})
    assert [(w.layout, w.tokens, w.max_sms) for w in points] == [
        *(("compact", 1, 0), ("compact", 1, 8), ("compact", 4, 0), ("compact", 4, 8)),
        *(("rank_major", 1, 0), ("rank_major", 1, 8), ("rank_major", 4, 0), ("rank_major", 4, 8)),
    ]


LAYER = {"ranks": 4, "tokens": 4, "layout": "rank_major", "intermediate": 2048}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpus_per_node": 2}, "gpus_per_node to divide 3 ranks"),
        ({"tokens": 0}, "tokens >= 1"),
        ({"topk": 11}, "topk <= 10"),
        ({"hidden": 260}, "hidden to be a multiple of 8"),
        ({"quant": "mxfp8", "hidden": 264}, "hidden to be a multiple of 32"),
        ({"quant": "of_paper"}, "quant to be one of none, fp8_per_token"),
        (LAYER | {"layout": "compact"}, "layout rank_major of a layer"),
        (LAYER | {"quant": "fp8_per_token"}, "quant none or fp8_per_1x128 of a layer"),
        (LAYER | {"combine_quant": "fp8_direct_cast"}, "combine_quant none or fp8_blockwise of a layer"),
        (LAYER | {"routing": "some_dropped"}, "uniform or zipf or all_to_one"),
        (LAYER | {"routing": "all_to_one", "experts": 8}, "rank 0"),
        (LAYER | {"hidden": 192}, "hidden a multiple of 128"),
        (LAYER | {"intermediate": 20}, "intermediate a multiple of 16"),
        (LAYER | {"gpus_per_node": 2}, "gpus_per_node 0 of a layer"),
    ],
)
def test_what_cannot_be_measured(changes: dict[str, Any], expected: str) -> None:
    usual: dict[str, Any] = {"ranks": 3, "tokens": 17, "hidden": 256, "topk": 3, "experts": 10}
    make_workloads({name: (value,) for name, value in (usual | {"hidden": 264}).items()})
    with pytest.raises(EpA2AError, match=expected):
        make_workloads({name: (value,) for name, value in (usual | changes).items()})


def test_only_weights_of_valid_ids_count():
    workload = workload_of(routing="out_of_range")
    inputs = workload.inputs(0)
    want = [
        sum(weight for i, weight in zip(ids, weights, strict=True) if 0 <= i < 10)
        for ids, weights in zip(inputs.ids.tolist(), inputs.weights.tolist(), strict=True)
    ]
    torch.testing.assert_close(workload.valid_weights(0), torch.tensor(want, dtype=torch.float32))
    assert min(want) < 0.999


def test_the_help_names_every_contender():
    words = re.findall(r"\w+", re.sub(r"\([^)]*\)", "", CONTENDER_NAMES))
    assert words == list(CONTENDERS)
