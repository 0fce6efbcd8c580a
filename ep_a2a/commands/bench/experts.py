"""The benchmark layer's experts: fp8 weights and grouped fp8 products with a scale per row, SwiGLU, sums per row.

Nothing waits on the host and shapes are fixed, so a CUDA graph can capture them.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from ep_a2a.commands.bench.layer_kernels import (
    count_pairs_kernel,
    grouped_product_kernel,
    quantize_rows_kernel,
    scatter_rows_kernel,
    sum_rows_kernel,
    swiglu_kernel,
)
from ep_a2a.commands.measure.session import Received
from ep_a2a.config import FP8_GROUP_SIZE
from ep_a2a.errors import UnsupportedError
from ep_a2a.kernels.layout import padded
from ep_a2a.routing import expert_ranges

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIN_AMAX = 1e-10
SLOT_ALIGNMENT = 16
"""The first slot of each expert is a multiple of this, so that TMA finds aligned rows and scales."""
NO_PAIR = -1.0
"""Weight of a slot between the last pair of an expert and the first of the next."""
WEIGHTS_SEED = 77
ADA = (8, 9)
MOST_FEW_ROWS = 96
"""Rows of an expert up to which a tile of a product has 64 of them, in place of 128."""
MAX_BLOCK = 1024
PROGRAMS_PER_SM = 32
"""More than run at once: a launch that waits for multiprocessors gets them before the last program has begun."""
INTERPRETED_PROGRAMS = 2
NUM_WARPS = 4
WIDE_WARPS = 8
"""Warps of a program that holds a whole row."""


class Matrices(NamedTuple):
    """A matrix of each own expert: values in fp8, one scale per output.

    Attributes:
        values: float8_e4m3fn `[E, out, in]`.
        scales: float32 `[E, out]`.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def of(self, expert: int) -> torch.Tensor:
        """Returns one expert's matrix in float32 `[out, in]`."""
        return self.values[expert].to(torch.float32) * self.scales[expert][:, None]


class MoEWeights(NamedTuple):
    """Weights of the layer on one rank; E own experts out of num_experts.

    Attributes:
        router: bf16 `[H, num_experts]`, the same on all ranks.
        w1: gate and up projections `[E, 2F, H]`.
        w2: down projections `[E, H, F]`.
        first_expert: global id of the first own expert.
    """

    router: torch.Tensor
    w1: Matrices
    w2: Matrices
    first_expert: int


@functools.lru_cache(maxsize=1)
def make_weights(
    num_experts: int, hidden_dim: int, width: int, world_size: int, rank: int, device: torch.device
) -> MoEWeights:
    """Returns random weights that keep the magnitude of activations, made on the device; keeps the last ones.

    Args:
        num_experts: over all ranks. hidden_dim: H. width: F.
        world_size, rank: whose experts.
        device: where they lie. They take 3 * H * F bytes for each expert.
    """
    make_weights.cache_clear()
    first, end = expert_ranges(num_experts, world_size)[rank]
    shared = torch.Generator(device).manual_seed(WEIGHTS_SEED)
    own = torch.Generator(device).manual_seed(WEIGHTS_SEED + 1 + rank)

    def draw(num_out: int, num_in: int) -> Matrices:
        values = torch.empty(end - first, num_out, num_in, dtype=FP8, device=device)
        scales = torch.empty(end - first, num_out, device=device)
        for expert in range(end - first):
            drawn = torch.randn(num_out, num_in, generator=own, device=device) / num_in**0.5
            values[expert], scales[expert] = quantize_whole_rows(drawn)
        return Matrices(values, scales)

    # Tokens have a standard deviation of 0.1: the gain makes logits that differ.
    router = torch.randn(hidden_dim, num_experts, generator=shared, device=device) * (20.0 / hidden_dim**0.5)
    return MoEWeights(router.bfloat16(), draw(2 * width, hidden_dim), draw(hidden_dim, width), first)


def quantize_whole_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 rows `[N, n]` in fp8, and one scale for each, float32 `[N]`."""
    scales = rows.abs().amax(1).clamp_min(MIN_AMAX) / FP8_MAX
    return (rows / scales[:, None]).to(FP8), scales


class Activated(NamedTuple):
    """Rows for the second product.

    Attributes:
        values: float8_e4m3fn `[S, F]`. scales: float32 `[S]`.
        slots: int32 `[R, K]`, slot of each pair; -1 where the expert is not own.
        bounds: int32 `[E + 1]`, first slot of each own expert, multiples of SLOT_ALIGNMENT; the last is their end.
        rows_of_expert: where all experts get as many: the received rows are those of all ranks, or padding.
    """

    values: torch.Tensor
    scales: torch.Tensor
    slots: torch.Tensor
    bounds: torch.Tensor
    rows_of_expert: int


def run_experts(received: Received, weights: MoEWeights) -> None:
    """Runs this rank's experts on the received rows: SwiGLU, router weights, sums per row into `received.out`."""
    finish_experts(begin_experts(received, weights), received, weights)


def begin_experts(received: Received, weights: MoEWeights, num_free: int = 0) -> Activated:
    """Runs what comes before the second product: sorts the rows by experts, casts them, multiplies by w1, activates.

    Args:
        received: the rows. weights: of the experts.
        num_free: multiprocessors that the product leaves to others.
    """
    rows, scales, ids, row_weights, _ = received
    hidden, topk, device = rows.shape[1], ids.shape[1], rows.device
    num_local, width = len(weights.w1.values), weights.w2.values.shape[2]
    positions, bounds = place_pairs(ids, weights.first_expert, num_local)
    num_slots = -(-ids.numel() // SLOT_ALIGNMENT) * SLOT_ALIGNMENT + num_local * SLOT_ALIGNMENT
    slots = torch.empty_like(positions)
    inputs = torch.empty(num_slots, hidden, dtype=torch.uint8, device=device)
    input_scales, slot_weights = torch.empty(num_slots, device=device), torch.full((num_slots,), NO_PAIR, device=device)
    scattered = (positions, bounds, slots, inputs, input_scales, slot_weights, weights.first_expert, len(rows))
    parts = (rows, row_weights if scales is None else scales, ids, row_weights, *scattered)
    groups = {"GROUPS_LANES": padded(hidden // FP8_GROUP_SIZE), "GROUP": FP8_GROUP_SIZE}
    sizes = {"TOPK": topk, "TOPK_LANES": padded(topk), "HIDDEN": hidden, "HAS_SCALES": scales is not None} | groups
    launch(scatter_rows_kernel, len(rows), *parts, **sizes, num_warps=WIDE_WARPS)
    rows_of_expert = ids.numel() // weights.router.shape[1]
    projected = grouped_product(inputs.view(FP8), input_scales, weights.w1, bounds, rows_of_expert, num_free)
    activated = torch.empty(num_slots, width, dtype=torch.uint8, device=device)
    activated_scales = torch.empty(num_slots, device=device)
    gated = (projected, slot_weights, bounds[-1:], activated, activated_scales)
    launch(swiglu_kernel, num_slots, *gated, WIDTH=width, LANES=padded(width))
    return Activated(activated.view(FP8), activated_scales, slots, bounds, rows_of_expert)


def finish_experts(activated: Activated, received: Received, weights: MoEWeights, num_free: int = 0) -> None:
    """Runs the rest: the product by w2, sums per row into `received.out`; num_free: as of `begin_experts`."""
    values, scales, slots, bounds, rows_of_expert = activated
    contributions = grouped_product(values, scales, weights.w2, bounds, rows_of_expert, num_free)
    out, hidden = received.out, received.out.shape[1]
    sizes = {"TOPK": slots.shape[1], "HIDDEN": hidden, "BLOCK": min(padded(hidden), MAX_BLOCK)}
    launch(sum_rows_kernel, len(out), contributions, slots, out, len(out), **sizes)


def place_pairs(ids: torch.Tensor, first_expert: int, num_local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns places of (row, own expert) pairs, expert after expert. The order inside an expert is open.

    Args:
        ids: global expert ids int32 `[R, K]`.
        first_expert, num_local: this rank's experts.

    Returns:
        int32 `[R, K]`, number of a pair among those of its expert, -1 where the expert is not own; bounds of Activated.
    """
    num_pairs = ids.numel()
    numbers = torch.zeros(2 * num_local + 1, dtype=torch.int32, device=ids.device)
    counts, bounds = numbers[:num_local], numbers[num_local:]
    positions = torch.empty_like(ids)
    sizes = {"NUM_LOCAL": num_local, "BLOCK": MAX_BLOCK}
    launch(count_pairs_kernel, -(-num_pairs // MAX_BLOCK), ids, counts, positions, first_expert, num_pairs, **sizes)
    aligned = (counts + (SLOT_ALIGNMENT - 1)) & -SLOT_ALIGNMENT
    torch.cumsum(aligned, 0, dtype=torch.int32, out=bounds[1:])
    return positions, bounds


def grouped_product(
    rows: torch.Tensor,
    scales: torch.Tensor,
    matrices: Matrices,
    bounds: torch.Tensor,
    rows_of_expert: int,
    num_free: int = 0,
) -> torch.Tensor:
    """Multiplies the rows of each expert by its matrix transposed; rows behind the last bound give anything.

    Args:
        rows: float8_e4m3fn `[S, in]`. scales: float32 `[S]`, of the rows.
        matrices: of the experts.
        bounds: as of Activated.
        rows_of_expert: rows of an expert, about.
        num_free: multiprocessors that are left to others: programs on all the rest stay to the end.

    Returns:
        bf16 `[S, out]`.
    """
    num_experts, width, depth = matrices.values.shape
    out = torch.empty(rows.shape[0], width, dtype=torch.bfloat16, device=rows.device)
    parts = (rows, scales, matrices.values, matrices.scales, bounds, out, num_experts)
    sizes = {"EXPERT_LANES": padded(num_experts), "WIDTH": width, "DEPTH": depth}
    sizes |= tile_of(rows_of_expert, width, depth)
    launch(grouped_product_kernel, max(1, num_sms(rows.device) - num_free), *parts, **sizes)
    return out


def tile_of(num_rows: int, width: int, depth: int) -> dict[str, int]:
    """Returns the constants and launch numbers of a product.

    Args:
        num_rows: an expert's rows, about.
        width, depth: of a matrix.
    """
    few = num_rows <= MOST_FEW_ROWS
    sizes = {"ROWS": 64 if few else 128, "COLUMNS": min(width & -width, 256), "STEP": min(depth & -depth, 128)}
    return sizes | {"num_warps": WIDE_WARPS, "num_stages": 4 if few else 3}


def check_device(device: torch.device) -> None:
    """Raises UnsupportedError where the GPU multiplies no fp8."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ADA
    if capability < ADA:
        raise UnsupportedError(
            "a GPU that multiplies fp8, of compute capability 8.9 or later",
            "compute capability {}.{}".format(*capability),
            "Leave --layer out.",
        )


def dense_experts(x: torch.Tensor, ids: torch.Tensor, row_weights: torch.Tensor, weights: MoEWeights) -> torch.Tensor:
    """Returns the weighted sums of this rank's experts, float32 `[N, H]`, with the roundings of `run_experts`.

    Args:
        x: float32 `[N, H]`. ids: global expert ids `[N, K]`. row_weights: float32 `[N, K]`.
        weights: this rank's.
    """
    out = torch.zeros_like(x)
    for number in range(weights.w1.values.shape[0]):
        chosen = ids == weights.first_expert + number
        tokens = chosen.any(1).nonzero().flatten()
        if not tokens.numel():
            continue
        weight = torch.where(chosen, row_weights, 0.0)[tokens].sum(1, keepdim=True)
        gate, up = (_rounded(x[tokens]) @ weights.w1.of(number).T).bfloat16().to(torch.float32).chunk(2, dim=1)
        activated = _rounded(torch.nn.functional.silu(gate) * up * weight)
        out[tokens] += activated @ weights.w2.of(number).T
    return out


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_whole_rows(rows)
    return values.to(torch.float32) * scales[:, None]


def quantize_rows(rows: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor) -> None:
    """Casts rows with one float32 scale per 128 elements, bit-equal to `quantize_per_1x128`.

    Args:
        rows: bf16, fp16 or fp32 `[T, H]`, H a multiple of 128.
        quantized: float8_e4m3fn `[T, H]`, written.
        scales: float32 `[T, H / 128]`, written.
    """
    num_groups = scales.shape[1]
    sizes = {"GROUPS": num_groups, "GROUPS_LANES": padded(num_groups), "GROUP": FP8_GROUP_SIZE}
    parts = (rows, quantized.view(torch.uint8), scales.view(torch.int32))
    launch(quantize_rows_kernel, len(rows), *parts, len(rows), **sizes)


def launch(kernel: Any, work: int, *args: Any, num_warps: int = NUM_WARPS, num_stages: int = 3, **sizes: Any) -> None:
    """Runs a kernel of layer_kernels.py with at most a program for each unit of work; on CPU in the interpreter."""
    device = args[0].device
    if device.type == "cpu":
        # slots between the last pair of an expert and the first of the next hold anything
        with np.errstate(over="ignore", invalid="ignore"):
            kernel.interpret((min(work, INTERPRETED_PROGRAMS),), *args, **sizes)
        return
    grid = (max(1, min(work, num_sms(device) * PROGRAMS_PER_SM)),)
    kernel[grid](*args, **sizes, num_warps=num_warps, num_stages=num_stages)


def num_sms(device: torch.device) -> int:
    """Returns the multiprocessors of a GPU; 1 on CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
