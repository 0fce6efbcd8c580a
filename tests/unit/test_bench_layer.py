"""The benchmark's MoE layer in one process: its experts against the dense ones, its kernels for GPUs, its table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ep_a2a.commands.bench import deepep, flashinfer
from ep_a2a.commands.bench.layer import (
    Gate,
    LayerWorkload,
    MoEWeights,
    grouped_matmul,
    quantize_rows,
    run_experts,
    sort_pairs,
)
from ep_a2a.commands.bench.layer_kernels import gather_rows_kernel, quantize_rows_kernel, sum_rows_kernel, swiglu_kernel
from ep_a2a.commands.measure.session import Received
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.errors import UnsupportedError
from ep_a2a.managers.external.flashinfer import row_alignment
from ep_a2a.managers.external.libraries import Library
from ep_a2a.quantization import dequantize, quantize_per_1x128
from ep_a2a.reference import expert_mlp_rows
from tests.offline_compile import compile_offline

HIDDEN, WIDTH, NUM_LOCAL, FIRST, TOPK = 384, 96, 5, 3, 4


def make_expert_weights() -> MoEWeights:
    w1 = (torch.randn(NUM_LOCAL, 2 * WIDTH, HIDDEN) / HIDDEN**0.5).bfloat16()
    w2 = (torch.randn(NUM_LOCAL, HIDDEN, WIDTH) / WIDTH**0.5).bfloat16()
    return MoEWeights(torch.empty(0), w1, w2, FIRST)


def make_ids(num_rows: int) -> torch.Tensor:
    """Own experts, others', padding rows and a repeated id."""
    ids = torch.randint(0, FIRST + NUM_LOCAL + 4, (num_rows, TOPK), dtype=torch.int32)
    ids[-2:] = -1
    ids[0] = FIRST
    return ids


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("num_rows", [3, 14])
def test_experts_are_the_dense_ones(num_rows: int, quantised: bool) -> None:
    weights, ids, row_weights = make_expert_weights(), make_ids(num_rows), torch.rand(num_rows, TOPK)
    x = torch.randn(num_rows, HIDDEN).bfloat16()
    rows, scales = quantize_per_1x128(x) if quantised else (x, None)
    # What is not received may be anything, NaN too.
    unreceived = rows.view(torch.uint8) if quantised else rows
    unreceived[-2:] = 0x7F if quantised else float("nan")
    out = torch.full((num_rows, HIDDEN), float("nan"), dtype=torch.bfloat16)
    run_experts(Received(rows, scales, ids, row_weights, out), weights)

    seen = dequantize(rows, scales, "fp8_per_1x128") if scales is not None else x.float()
    dense = expert_mlp_rows(seen[:-2], ids[:-2] - FIRST, row_weights[:-2], weights.w1, weights.w2, 0, NUM_LOCAL)
    error = (out[:-2].float() - dense).norm(dim=1)
    assert bool((error <= 1e-2 * dense.norm(dim=1)).all())
    assert not out[-2:].any()


def test_rows_without_own_experts() -> None:
    out = torch.full((2, HIDDEN), float("nan"), dtype=torch.bfloat16)
    received = Received(
        torch.randn(2, HIDDEN).bfloat16(), None, torch.zeros(2, TOPK, dtype=torch.int32), torch.rand(2, TOPK), out
    )
    run_experts(received, make_expert_weights())
    assert not out.any()


def test_all_pairs_on_one_expert() -> None:
    ids = torch.full((4, TOPK), FIRST + 1, dtype=torch.int32)
    pairs, slots, ends = sort_pairs(ids, FIRST, NUM_LOCAL)
    assert ends.tolist() == [0, 16, 16, 16, 16]
    assert pairs[:16].tolist() == list(range(16)) == slots.view(-1).tolist()


def test_pairs_are_sorted_stably() -> None:
    ids = make_ids(50)
    pairs, slots, ends = sort_pairs(ids, FIRST, NUM_LOCAL)
    local = ids.view(-1) - FIRST
    own = ((local >= 0) & (local < NUM_LOCAL)).nonzero().flatten()
    expected = own[local[own].sort(stable=True).indices]
    assert pairs[: len(own)].tolist() == expected.tolist()
    assert ends.tolist() == torch.bincount(local[own], minlength=NUM_LOCAL).cumsum(0).tolist()
    assert slots.view(-1)[expected].tolist() == list(range(len(own)))
    assert int((slots >= 0).sum()) == len(own)
    assert (pairs.dtype, slots.dtype, ends.dtype) == (torch.int32,) * 3


def test_grouped_matmul_with_empty_groups() -> None:
    rows, matrices = torch.randn(9, 16).bfloat16(), torch.randn(4, 8, 16).bfloat16()
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    product = grouped_matmul(rows, matrices, ends)
    torch.testing.assert_close(product[:3], rows[:3] @ matrices[1].T)
    torch.testing.assert_close(product[3:8], rows[3:8] @ matrices[3].T)


def test_cast_is_the_reference_s() -> None:
    x = torch.randn(5, HIDDEN).bfloat16()
    quantized, scales = torch.empty(5, HIDDEN, dtype=torch.float8_e4m3fn), torch.empty(5, HIDDEN // 128)
    quantize_rows(x, quantized, scales)
    expected, expected_scales = quantize_per_1x128(x)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_gate_keeps_its_addresses() -> None:
    x = torch.randn(6, 32).bfloat16()
    gate = Gate(x, torch.randn(32, 8).bfloat16(), 3)
    addresses = gate.weights.data_ptr(), gate.ids.data_ptr()
    gate()
    assert (gate.weights.data_ptr(), gate.ids.data_ptr()) == addresses
    probabilities = torch.softmax(x @ gate._router, 1, dtype=torch.float32)
    torch.testing.assert_close(gate.weights, probabilities.gather(1, gate.ids.long()))
    assert bool((probabilities.topk(3).values == gate.weights).all())


def tensors(*dtypes: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(16, dtype=dtype) for dtype in dtypes)


BF16, FP8, INT, FLOAT, BYTE = torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.float32, torch.uint8
GATHER = {"TOPK": 8, "HIDDEN": 7168, "BLOCK": 1024}
VARIANTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "gather": (gather_rows_kernel, tensors(BF16, FLOAT, INT, INT, BF16), GATHER | {"GROUP": 0}),
    "gather-fp8": (gather_rows_kernel, tensors(FP8, FLOAT, INT, INT, BF16), GATHER | {"GROUP": 128}),
    "swiglu": (swiglu_kernel, tensors(BF16, FLOAT, INT, INT, BF16), {"WIDTH": 2048, "BLOCK": 1024}),
    "sum": (sum_rows_kernel, (*tensors(BF16, INT, BF16), 5), GATHER),
    "quantize": (
        quantize_rows_kernel,
        (*tensors(BF16, BYTE, INT), 5),
        {"GROUPS": 56, "GROUPS_LANES": 64, "GROUP": 128},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compile_to_wide_accesses(name: str) -> None:
    kernel, args, constants = VARIANTS[name]
    ptx = compile_offline(kernel, args, constants, num_warps=4)["ptx"]
    assert "ld.global.v2" in ptx or "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


def workload(**changes: Any) -> Workload:
    return Workload(world_size=4, num_tokens=4, max_num_tokens=4, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"layout": "expert_major"}, None),
        ({"topk": 3}, "num_experts_per_token out of 1, 2, 4"),
        ({"combine_quant": "fp8_blockwise"}, "fp8_direct_cast"),
        ({"combine_quant": "fp8_direct_cast", "dtype": torch.float16}, "bfloat16"),
        ({"routing": "some_dropped"}, "dropped"),
        ({"num_experts": 3, "topk": 2}, "multiple of 4"),
    ],
)
def test_what_flashinfer_cannot_do(changes: dict[str, Any], reason: str | None) -> None:
    with mock.patch.object(Library, "problem", return_value=None):
        said = flashinfer.unavailable(workload(**changes), torch.device("cuda"))
    assert (said is None) == (reason is None)
    assert reason is None or reason in str(said)


@pytest.mark.parametrize(
    ("changes", "low_latency", "reason"),
    [
        ({"num_tokens": 511, "max_num_tokens": 511}, True, None),
        ({"num_tokens": 512, "max_num_tokens": 512}, True, "at most 511"),
        ({"num_tokens": 512, "max_num_tokens": 512}, False, None),
        ({"quant_type": "fp8_per_token"}, False, "fp8_per_1x128"),
    ],
)
def test_what_deepep_cannot_do(changes: dict[str, Any], low_latency: bool, reason: str | None) -> None:
    with mock.patch.object(Library, "problem", return_value=None):
        said = deepep.unavailable(replace(workload(), **changes), torch.device("cuda"), low_latency=low_latency)
    assert (said is None) == (reason is None)
    assert reason is None or reason in str(said)


def test_libraries_need_gpus() -> None:
    for module in (flashinfer, deepep):
        assert module.unavailable(workload(), torch.device("cpu")) == "needs GPUs"


@pytest.mark.parametrize(("width", "expected"), [(1, 4), (6, 8), (56, 16), (7168, 16)])
def test_alignment_of_payload_rows(width: int, expected: int) -> None:
    assert row_alignment(width, torch.float32) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout": "compact"}, "layout rank_major of a layer"),
        ({"quant_type": "fp8_per_token"}, "quant_type none or fp8_per_1x128 of a layer"),
        ({"combine_quant": "fp8_direct_cast"}, "combine_quant none of a layer"),
        ({"dtype": torch.float16}, "dtype torch.bfloat16 of a layer"),
        ({"max_num_tokens": 8}, "max_num_tokens 4 of a layer"),
    ],
)
def test_what_the_layer_refuses(changes: dict[str, Any], expected: str) -> None:
    layer = LayerWorkload(world_size=4, num_tokens=4, max_num_tokens=4, layout="rank_major")
    layer.check()
    with pytest.raises(UnsupportedError, match=expected):
        replace(layer, **changes).check()
