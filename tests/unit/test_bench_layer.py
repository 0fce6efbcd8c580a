"""The benchmark's MoE layer in one process: its experts against the dense ones, its kernels for GPUs, its table."""

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ep_a2a.commands.bench import experts, layer_kernels
from ep_a2a.commands.bench.contenders import CONTENDERS
from ep_a2a.commands.bench.layer import Gate
from ep_a2a.commands.measure.session import Received
from ep_a2a.commands.measure.workload import Workload
from ep_a2a.managers.external.library import Library
from ep_a2a.quantization import dequantize, quantize_per_1x128
from ep_a2a.reference import expert_mlp_rows
from tests.offline_compile import compile_offline

HIDDEN, WIDTH, NUM_LOCAL, FIRST, TOPK = 384, 96, 5, 3, 4


def make_expert_weights() -> experts.MoEWeights:
    def matrices(num_out: int, num_in: int) -> experts.Matrices:
        drawn = torch.randn(NUM_LOCAL * num_out, num_in) / num_in**0.5
        values, scales = experts.quantize_whole_rows(drawn)
        return experts.Matrices(values.view(NUM_LOCAL, num_out, num_in), scales.view(NUM_LOCAL, num_out))

    return experts.MoEWeights(torch.empty(0, 12), matrices(2 * WIDTH, HIDDEN), matrices(HIDDEN, WIDTH), FIRST)


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
    experts.run_experts(Received(rows, scales, ids, row_weights, out), weights)

    seen = (dequantize(rows, scales, "fp8_per_1x128") if scales is not None else x.float())[:-2]
    rounded = experts.dense_experts(seen, ids[:-2], row_weights[:-2], weights)
    w1, w2 = (torch.stack([each.of(expert) for expert in range(NUM_LOCAL)]) for each in (weights.w1, weights.w2))
    exact = expert_mlp_rows(seen, ids[:-2] - FIRST, row_weights[:-2], w1, w2, 0, NUM_LOCAL)
    # fp8 has four bits: a row of exact activations is a few per cent away, one with the same roundings is not.
    for dense, tolerance in ((rounded, 1e-2), (exact, 8e-2)):
        error = (out[:-2].float() - dense).norm(dim=1)
        assert bool((error <= tolerance * dense.norm(dim=1)).all())
    assert not out[-2:].any()


def test_rows_without_own_experts() -> None:
    out = torch.full((2, HIDDEN), float("nan"), dtype=torch.bfloat16)
    received = Received(
        torch.randn(2, HIDDEN).bfloat16(), None, torch.zeros(2, TOPK, dtype=torch.int32), torch.rand(2, TOPK), out
    )
    experts.run_experts(received, make_expert_weights())
    assert not out.any()


def test_the_product_has_more_rows_than_a_tile_none_and_a_part_of_one() -> None:
    width, depth = 64, 256
    rows, scales = experts.quantize_whole_rows(torch.randn(112, depth))
    values, matrix_scales = experts.quantize_whole_rows(torch.randn(4 * width, depth))
    matrices = experts.Matrices(values.view(4, width, depth), matrix_scales.view(4, width))
    bounds = torch.tensor([0, 80, 80, 96, 96], dtype=torch.int32)
    product = experts.grouped_product(rows, scales, matrices, bounds, 16)
    wide = rows.float() * scales[:, None]
    for expert, span in ((0, slice(0, 80)), (2, slice(80, 96))):
        torch.testing.assert_close(product[span], (wide[span] @ matrices.of(expert).T).bfloat16())


@pytest.mark.parametrize(("num_rows", "rows"), [(1, 64), (512, 128)])
def test_product_compiles_to_fp8_of_the_tensor_cores(num_rows: int, rows: int) -> None:
    tile = experts.tile_of(num_rows, 4096, 7168)
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    assert (tile, stages) == ({"ROWS": rows, "COLUMNS": 256, "STEP": 128}, 4 if rows == 64 else 3)
    parts = tensors(experts.FP8, FLOAT, experts.FP8, FLOAT, INT, BF16)
    sizes = {"EXPERT_LANES": 64, "WIDTH": 4096, "DEPTH": 7168}
    made = compile_offline(layer_kernels.grouped_product_kernel, (*parts, 5), sizes | tile, warps)
    assert re.search(r"wgmma\.mma_async\S+f32\.e4m3\.e4m3", made["ptx"])
    assert ".local" not in made["ptx"]


def test_a_product_leaves_multiprocessors_free(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[int] = []
    monkeypatch.setattr(experts, "num_sms", lambda device: 132)
    monkeypatch.setattr(experts, "launch", lambda kernel, work, *args, **sizes: grids.append(work))
    matrices = experts.Matrices(torch.empty(1, 16, 16), torch.empty(1, 16))
    for free in (0, 8, 200):
        experts.grouped_product(torch.empty(16, 16), torch.empty(16), matrices, torch.zeros(2), 16, free)
    assert grids == [132, 124, 1]


def test_cast_is_the_reference_s() -> None:
    x = torch.randn(5, HIDDEN).bfloat16()
    quantized, scales = torch.empty(5, HIDDEN, dtype=torch.float8_e4m3fn), torch.empty(5, HIDDEN // 128)
    experts.quantize_rows(x, quantized, scales)
    expected, expected_scales = quantize_per_1x128(x)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "all_to_one"])
def test_gate_takes_the_workload_s_experts(routing: str) -> None:
    layer = Workload(2, 6, hidden=128, topk=3, experts=8, layout="rank_major", routing=routing)
    gate = Gate(layer, 1, torch.randn(128, 8).bfloat16())
    addresses = gate.weights.data_ptr(), gate.ids.data_ptr()
    gate()
    assert (gate.weights.data_ptr(), gate.ids.data_ptr()) == addresses
    assert torch.equal(gate.ids.sort(1).values, layer.ids(1).sort(1).values)
    probabilities = torch.softmax((gate.x @ gate._router).float(), 1).gather(1, gate.ids.long())
    # The bias leaves two bits behind the point of a logit.
    torch.testing.assert_close(gate.weights, probabilities / probabilities.sum(1, keepdim=True), rtol=0.3, atol=0.0)


def tensors(*dtypes: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(16, dtype=dtype) for dtype in dtypes)


BF16, INT, FLOAT, BYTE = torch.bfloat16, torch.int32, torch.float32, torch.uint8
ROW = {"TOPK": 6, "HIDDEN": 7168}
SCATTER = ROW | {"TOPK_LANES": 8, "GROUPS_LANES": 64, "GROUP": 128}
SCATTERED = tensors(FLOAT, INT, FLOAT, INT, INT, INT, BYTE, FLOAT, FLOAT)
VARIANTS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "scatter": (layer_kernels.scatter_rows_kernel, (*tensors(BF16), *SCATTERED, 5, 5), SCATTER | {"HAS_SCALES": False}),
    "scatter-fp8": (
        layer_kernels.scatter_rows_kernel,
        (*tensors(experts.FP8), *SCATTERED, 5, 5),
        SCATTER | {"HAS_SCALES": True},
    ),
    "swiglu": (layer_kernels.swiglu_kernel, tensors(BF16, FLOAT, INT, BYTE, FLOAT), {"WIDTH": 3072, "LANES": 4096}),
    "sum": (layer_kernels.sum_rows_kernel, (*tensors(BF16, INT, BF16), 5), ROW | {"BLOCK": 1024}),
    "quantize": (
        layer_kernels.quantize_rows_kernel,
        (*tensors(BF16, BYTE, INT), 5),
        {"GROUPS": 56, "GROUPS_LANES": 64, "GROUP": 128},
    ),
}


def test_counting_compiles() -> None:
    ptx = compile_offline(
        layer_kernels.count_pairs_kernel, (*tensors(INT, INT, INT), 5, 5), {"NUM_LOCAL": 64, "BLOCK": 1024}, 4
    )
    assert "atom.global.gpu.relaxed.add" in ptx["ptx"]


@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_compile_to_wide_accesses(name: str) -> None:
    kernel, args, constants = VARIANTS[name]
    ptx = compile_offline(kernel, args, constants, num_warps=4)["ptx"]
    assert "ld.global.v2" in ptx or "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flashinfer", {}, None),
        ("flashinfer", {"layout": "expert_major"}, None),
        ("flashinfer", {"topk": 3}, "num_experts_per_token out of 1, 2, 4"),
        ("flashinfer", {"combine_quant": "fp8_blockwise"}, "fp8_direct_cast"),
        ("flashinfer", {"routing": "some_dropped"}, "dropped"),
        ("flashinfer", {"quant": "fp8_per_token"}, "bytes of a token's scales that is a multiple of 16"),
        ("flashinfer", {"experts": 3, "topk": 2}, "multiple of 4"),
        ("deepep", {"tokens": 512}, None),
        ("deepep", {"quant": "fp8_per_token"}, "fp8_per_1x128"),
    ],
)
def test_what_libraries_cannot_do(name: str, changes: dict[str, Any], reason: str | None) -> None:
    with mock.patch.object(Library, "problem", return_value=None):
        said = CONTENDERS[name].unavailable(replace(Workload(4, 4), **changes), torch.device("cuda"))
    assert (said is None) == (reason is None)
    assert reason is None or reason in str(said)
