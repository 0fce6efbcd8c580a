"""The benchmark's MoE layer without communication: weights, router, one rank's experts, and the dense layer's check.

All transports run this code, so layers differ in their communication only. The experts have fixed shapes and never wait
on the host, so a CUDA graph can capture them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ep_a2a.commands.bench.layer_kernels import gather_rows_kernel, quantize_rows_kernel, sum_rows_kernel, swiglu_kernel
from ep_a2a.config import FP8_GROUP_SIZE, QuantType
from ep_a2a.errors import CheckFailedError
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.reference import expert_mlp_rows
from ep_a2a.routing import expert_ranges

if TYPE_CHECKING:
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.testing.worker import RankContext

WEIGHTS_SEED = 77
MAX_CHECKED_TOKENS = 32
"""Tokens of each rank that are compared with the dense layer, which is slow."""
TOLERANCE = 2e-2
"""Norm of a row's error over the norm of the row: roundings to bf16 between the parts, and of the ranks' sums."""
MAX_BLOCK = 1024
NUM_WARPS = 4
PROGRAMS_PER_SM = 8
INTERPRETED_PROGRAMS = 2


@dataclass(frozen=True)
class MoEWeights:
    """Weights of the layer on one rank, bf16; E own experts out of num_experts.

    Attributes:
        router: `[H, num_experts]`, the same on all ranks.
        w1: gate and up projections `[E, 2F, H]`.
        w2: down projections `[E, H, F]`.
        first_expert: global id of the first own expert.
    """

    router: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    first_expert: int


def make_weights(workload: Workload, intermediate_dim: int, context: RankContext) -> MoEWeights:
    """Returns random weights that keep the magnitude of activations."""
    device, hidden_dim = context.device, workload.hidden_dim
    first, end = expert_ranges(workload.num_experts, workload.world_size)[context.rank]
    shared = torch.Generator(device).manual_seed(WEIGHTS_SEED)
    own = torch.Generator(device).manual_seed(WEIGHTS_SEED + 1 + context.rank)

    def draw(generator: torch.Generator, *shape: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
        return drawn.mul_(gain / fan_in**0.5)

    return MoEWeights(
        # Tokens have a standard deviation of 0.1: the gain makes logits that tell experts apart.
        router=draw(shared, hidden_dim, workload.num_experts, fan_in=hidden_dim, gain=20.0),
        w1=draw(own, end - first, 2 * intermediate_dim, hidden_dim, fan_in=hidden_dim),
        w2=draw(own, end - first, hidden_dim, intermediate_dim, fan_in=intermediate_dim),
        first_expert=first,
    )


class Gate:
    """The router of one batch, with results at fixed addresses.

    Args:
        x: tokens bf16 `[T, H]`, read again at each call.
        router: bf16 `[H, num_experts]`.
        topk: K.

    Attributes:
        weights: float32 `[T, K]`, softmax over all experts, of the K largest. ids: int32 `[T, K]`.
    """

    def __init__(self, x: torch.Tensor, router: torch.Tensor, topk: int) -> None:
        self.x, self._router = x, router
        self.weights = torch.zeros(x.shape[0], topk, device=x.device)
        self.ids = torch.zeros(x.shape[0], topk, dtype=torch.int32, device=x.device)
        self._wide_ids = torch.zeros(x.shape[0], topk, dtype=torch.int64, device=x.device)

    def __call__(self) -> None:
        """Fills weights and ids."""
        probabilities = torch.softmax(self.x @ self._router, dim=1, dtype=torch.float32)
        torch.topk(probabilities, self.ids.shape[1], dim=1, out=(self.weights, self._wide_ids))
        self.ids.copy_(self._wide_ids)


class Received(NamedTuple):
    """Rows as a transport hands them to the experts; R rows of which those without an own expert are skipped.

    Attributes:
        rows: `[R, H]`, bf16 or float8_e4m3fn.
        scales: float32 `[R, H / 128]` of fp8 rows, else None.
        ids: global expert ids int32 `[R, K]`; ids of other ranks' experts and padding (-1) are skipped.
        weights: router weights float32 `[R, K]`.
        out: bf16 `[R, H]` to leave the sums in; rows without an own expert become zeros.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


class SortedPairs(NamedTuple):
    """The (row, own expert) pairs in the order of experts, and where each lies; N = R * K.

    Attributes:
        pairs: int32 `[N + 1]`, row * K + k of the pair in each slot; anything past the last one.
        slots: int32 `[R, K]`, where a pair lies; -1 where the expert is not this rank's.
        ends: int32 `[E]`, one past the last slot of each own expert; the last one is the number of pairs.
    """

    pairs: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor


def sort_pairs(ids: torch.Tensor, first_expert: int, num_local: int) -> SortedPairs:
    """Returns the pairs of this rank's experts in the stable order of experts, by counting: no sort, no host wait.

    Args:
        ids: global expert ids int32 `[R, K]`.
        first_expert, num_local: this rank's experts.
    """
    num_pairs = ids.numel()
    local = ids.reshape(-1) - first_expert
    is_local = (local >= 0) & (local < num_local)
    experts = torch.arange(num_local, dtype=torch.int32, device=ids.device)
    # One running count through expert after expert gives every pair the number of its slot.
    counted = torch.cumsum((local[None, :] == experts[:, None]).view(-1), 0, dtype=torch.int32).view(num_local, -1)
    own = counted.gather(0, local.clamp(0, num_local - 1).to(torch.int64)[None, :])[0] - 1
    slots = torch.where(is_local, own, -1)
    pairs = torch.zeros(num_pairs + 1, dtype=torch.int32, device=ids.device)
    numbers = torch.arange(num_pairs, dtype=torch.int32, device=ids.device)
    pairs.scatter_(0, torch.where(is_local, own, num_pairs).to(torch.int64), numbers)
    return SortedPairs(pairs, slots.view_as(ids), counted[:, -1].contiguous())


def run_experts(received: Received, weights: MoEWeights) -> None:
    """Runs this rank's experts on the received rows: SwiGLU, router weights, sums per row into `received.out`."""
    rows, scales, ids, row_weights, out = received
    num_rows, hidden_dim = rows.shape
    topk, width, device = ids.shape[1], weights.w2.shape[2], rows.device
    pairs, slots, ends = sort_pairs(ids, weights.first_expert, weights.w1.shape[0])
    count = ends[-1:]
    inputs = torch.empty(pairs.numel(), hidden_dim, dtype=torch.bfloat16, device=device)
    launch(
        gather_rows_kernel,
        device,
        rows,
        row_weights if scales is None else scales,
        pairs,
        count,
        inputs,
        TOPK=topk,
        HIDDEN=hidden_dim,
        BLOCK=block_of(hidden_dim),
        GROUP=0 if scales is None else FP8_GROUP_SIZE,
    )
    projected = grouped_matmul(inputs, weights.w1, ends)
    activated = torch.empty(pairs.numel(), width, dtype=torch.bfloat16, device=device)
    launch(swiglu_kernel, device, projected, row_weights, pairs, count, activated, WIDTH=width, BLOCK=block_of(width))
    contributions = grouped_matmul(activated, weights.w2, ends)
    launch(
        sum_rows_kernel,
        device,
        contributions,
        slots,
        out,
        num_rows,
        TOPK=topk,
        HIDDEN=hidden_dim,
        BLOCK=block_of(hidden_dim),
    )


def grouped_matmul(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiplies rows of group e by matrices[e] transposed; groups are consecutive, later rows give anything.

    Args:
        rows: bf16 `[N, in]`, N above the last end.
        matrices: bf16 `[E, out, in]`.
        ends: int32 `[E]`, one past each group's last row.

    Returns:
        bf16 `[N, out]`.
    """
    grouped: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if rows.device.type == "cuda" and grouped is not None:
        result: torch.Tensor = grouped(rows, matrices.transpose(1, 2), offs=ends)
        return result
    out = rows.new_zeros(rows.shape[0], matrices.shape[1])
    start = 0
    for matrix, end in zip(matrices, ends.tolist()):
        out[start:end] = rows[start:end] @ matrix.T
        start = end
    return out


def launch(kernel: Any, device: torch.device, *args: Any, **constants: Any) -> None:
    """Runs a kernel of layer_kernels.py with as many programs as the device holds; on CPU in the interpreter."""
    if device.type == "cpu":
        kernel.interpret((INTERPRETED_PROGRAMS,), *args, **constants)
        return
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    kernel[(num_sms * PROGRAMS_PER_SM,)](*args, **constants, num_warps=NUM_WARPS)


def block_of(width: int) -> int:
    """Returns the number of elements that a program handles at once."""
    return min(1 << (width - 1).bit_length(), MAX_BLOCK)


def quantize_rows(rows: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor) -> None:
    """Casts rows with one float32 scale per 128 elements, bit-equal to `quantize_per_1x128`.

    Args:
        rows: bf16, fp16 or fp32 `[T, H]`, H a multiple of 128.
        quantized: float8_e4m3fn `[T, H]`, written.
        scales: float32 `[T, H / 128]`, written.
    """
    num_groups = scales.shape[1]
    launch(
        quantize_rows_kernel,
        rows.device,
        rows,
        quantized.view(torch.uint8),
        scales.view(torch.int32),
        rows.shape[0],
        GROUPS=num_groups,
        GROUPS_LANES=1 << (num_groups - 1).bit_length(),
        GROUP=FP8_GROUP_SIZE,
    )


def check_layer(
    name: str, workload: Workload, gate: Gate, weights: MoEWeights, context: RankContext, got: torch.Tensor
) -> None:
    """Compares a layer's result with the dense layer in float32: every rank adds its experts' part. Collective.

    Args:
        name: whose result it is, for the error.
        workload: says how tokens are quantised on the way.
        gate: has been run; its tokens, ids and weights are those of the result.
        weights: this rank's.
        context: this rank and its group.
        got: `[T, H]`, this rank's result.

    Raises:
        CheckFailedError: a row is too far off, on this rank.
    """
    num_checked = min(MAX_CHECKED_TOKENS, workload.num_tokens)
    x = gate.x[:num_checked]
    if workload.quant_type != QuantType.NONE:
        x = dequantize(*quantize(x, workload.quant_type), workload.quant_type)
    want = torch.empty(0)
    for source in range(context.world_size):
        tokens, ids, row_weights = (
            each[:num_checked].to(dtype, copy=True)
            for each, dtype in ((x, torch.float32), (gate.ids, torch.int32), (gate.weights, torch.float32))
        )
        for each in (tokens, ids, row_weights):
            dist.broadcast(each, source, group=context.group)
        part = expert_mlp_rows(
            tokens, ids - weights.first_expert, row_weights, weights.w1, weights.w2, 0, weights.w1.shape[0]
        )
        dist.all_reduce(part, group=context.group)
        if source == context.rank:
            want = part
    error = (got[:num_checked].float() - want).norm(dim=1)
    allowed = TOLERANCE * want.norm(dim=1)
    if not bool((error <= allowed).all()):
        token = int((error - allowed).nan_to_num(torch.inf).argmax())
        raise CheckFailedError(
            f"{name} to give the dense layer's rows within {TOLERANCE:g} of their norms",
            f"{float(error[token]):g} where the norm is {float(want[token].norm()):g}, in token {token}",
        )
