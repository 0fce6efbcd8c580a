"""Bodies of two tests: one MoE layer over all ranks, through the EP group's manager and by the direct API.

Every rank brings tokens, quantised before dispatch or inside it; experts run on the dequantised rows; what combine
returns is compared with the dense layer on the same dequantised tokens. Expert weights are quantised as AITER's test
does: by row for per_Token, by 128x128 block for per_128x128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ep_a2a
from ep_a2a import shmem
from ep_a2a.config import num_owned_experts
from ep_a2a.errors import ClosedError, NotInitializedError
from ep_a2a.ops import EpDispatchCombineConfig, EpDispatchCombineOp
from ep_a2a.quantization import (
    dequantize,
    dequantize_per_128x128,
    quantize_per_1x128,
    quantize_per_128x128,
    quantize_per_token,
)
from ep_a2a.reference import DispatchReference, dense_moe, dispatch_reference, expert_mlp_rows
from ep_a2a.routing import expert_ranges, softmax_topk
from tests.cases.op_cases import Case, check_dispatched

if TYPE_CHECKING:
    from ep_a2a.testing import RankContext

GROUP_NAME = "ep_a2a_test_default"
NUM_STEPS = 2
# quant_type of a fused cast, by AITER's name
FUSED = {"none": "none", "per_Token": "fp8_per_token", "per_128x128": "fp8_per_1x128"}
BF16_HALF_ULP = 2.0**-8


@dataclass(frozen=True)
class Layer:
    """One MoE layer; the defaults are AITER's: E = 16, top-2, 128 tokens."""

    world_size: int
    hidden_dim: int = 6144
    intermediate_dim: int = 1024
    num_experts: int = 16
    topk: int = 2
    max_tokens: int = 128
    quantisation: str = "per_Token"
    fused: bool = False
    layout: str = "compact"

    @property
    def casts_inside(self) -> bool:
        return self.fused and self.quantisation != "none"

    def num_tokens(self, step: int, rank: int) -> int:
        """All ranks bring the most they may; in the next step fewer, and the last one nothing."""
        if step % 2 == 0:
            return self.max_tokens
        return 0 if rank == self.world_size - 1 else max(1, self.max_tokens - 3 * rank - 1)

    def local_experts(self, rank: int) -> int:
        return num_owned_experts(self.num_experts, self.world_size, rank)


@dataclass(frozen=True)
class Tokens:
    """What one rank brings in one step, on the CPU.

    Attributes:
        plain: bf16 [T, H], as the model has them.
        sent: what travels: fp8, or `plain`.
        scales: float32 [T, S], or None.
        seen: float32 [T, H], what the experts see: `sent` dequantised.
        weights, ids: [T, K] of the router.
    """

    plain: torch.Tensor
    sent: torch.Tensor
    scales: torch.Tensor | None
    seen: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def quantised(quantisation: str, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Activations as AITER quantises them; per_128x128 means 1x128 for activations."""
    if quantisation == "none":
        return tokens, None
    return (quantize_per_token if quantisation == "per_Token" else quantize_per_1x128)(tokens)


def dequantised(quantisation: str, tokens: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return tokens.float() if scales is None else dequantize(tokens, scales, FUSED[quantisation])


def make_tokens(layer: Layer, step: int, rank: int) -> Tokens:
    generator = torch.Generator().manual_seed(1 + 1009 * step + rank)
    num_tokens = layer.num_tokens(step, rank)
    plain = torch.randn(num_tokens, layer.hidden_dim, generator=generator).to(torch.bfloat16)
    sent, scales = quantised(layer.quantisation, plain)
    logits = torch.randn(num_tokens, layer.num_experts, generator=generator)
    weights, ids = softmax_topk(logits, layer.topk)
    return Tokens(plain, sent, scales, dequantised(layer.quantisation, sent, scales), weights, ids)


def make_experts(layer: Layer, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """w1 [E, 2F, H] and w2 [E, H, F] in bf16, as the quantised weights stand for; the same on every rank."""
    generator = torch.Generator(device).manual_seed(7)
    shapes = (2 * layer.intermediate_dim, layer.hidden_dim), (layer.hidden_dim, layer.intermediate_dim)
    made = []
    for rows, columns in shapes:
        one = torch.empty(layer.num_experts, rows, columns, dtype=torch.bfloat16, device=device)
        for expert in one:
            drawn = torch.randn(rows, columns, generator=generator, device=device) / columns**0.5
            expert.copy_(_through_fp8(layer.quantisation, drawn))
        made.append(one)
    return made[0], made[1]


def _through_fp8(quantisation: str, weights: torch.Tensor) -> torch.Tensor:
    if quantisation == "none":
        return weights
    if quantisation == "per_128x128":
        return dequantize_per_128x128(*quantize_per_128x128(weights))
    return dequantize(*quantize_per_token(weights), "fp8_per_token")


def reference_of(layer: Layer, everyone: list[Tokens]) -> list[DispatchReference]:
    return dispatch_reference(
        [tokens.sent for tokens in everyone],
        [tokens.weights for tokens in everyone],
        [tokens.scales for tokens in everyone],
        [tokens.ids for tokens in everyone],
        num_experts=layer.num_experts,
        max_num_tokens=layer.max_tokens,
        layout=layer.layout,
    )


def run_experts(
    layer: Layer, rank: int, got: tuple[Any, ...], reference: DispatchReference, experts: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """This rank's experts on the received rows: bf16 in the layout of dispatch; other rows hold NaN, for nobody."""
    tokens, weights, scales, ids, _ = got
    first, end = expert_ranges(layer.num_experts, layer.world_size)[rank]
    out = torch.full((*tokens.shape[:-1], layer.hidden_dim), float("nan"), dtype=torch.bfloat16, device=tokens.device)
    for source in range(layer.world_size):
        # the reference knows where each source's rows lie; that they are right has been checked
        parts = [reference.rows_of_source(t, source) if t is not None else None for t in (tokens, scales, ids, weights)]
        assert parts[0] is not None
        assert parts[2] is not None
        assert parts[3] is not None
        seen = dequantised(layer.quantisation, parts[0], parts[1])
        rows = expert_mlp_rows(seen, parts[2], parts[3], *experts, first, end - first)
        reference.rows_of_source(out, source).copy_(rows)
    return out


def check_combined(layer: Layer, result: torch.Tensor, own: Tokens, experts: tuple[torch.Tensor, ...]) -> None:
    """Against the dense layer: each rank's part is rounded to bf16 once, and so is their sum."""
    device = result.device
    seen, weights, ids = (tensor.to(device) for tensor in (own.seen, own.weights, own.ids))
    dense = dense_moe(seen, weights, ids, *experts)
    ranges = expert_ranges(layer.num_experts, layer.world_size)
    parts = [expert_mlp_rows(seen, ids, weights, *experts, first, end - first).abs() for first, end in ranges]
    roundings = torch.stack([*parts, dense.abs()]).sum(0) * BF16_HALF_ULP
    # float32 sums of other batch shapes differ in their last bits; half an ulp of bf16 is 2**15 of those of float32
    tolerance = 1.01 * roundings + 1e-5 * dense.abs().max() if dense.numel() else roundings
    error = (result.float() - dense).abs()
    assert result.shape == dense.shape
    assert bool((error <= tolerance).all()), f"largest error {error.max()} where {tolerance[error > tolerance].max()}"


def run_layer(layer: Layer, op: Any, context: RankContext) -> None:
    """Dispatch, experts and combine, twice, each part against its oracle."""
    device, rank = context.device, context.rank
    experts = make_experts(layer, device)
    for step in range(NUM_STEPS):
        everyone = [make_tokens(layer, step, each) for each in range(layer.world_size)]
        own = everyone[rank]
        plain, weights, ids = (tensor.to(device) for tensor in (own.plain, own.weights, own.ids))
        sent, scales = (plain, None) if layer.casts_inside else quantised(layer.quantisation, plain)
        got = op.dispatch(sent, weights, scales, ids)
        reference = reference_of(layer, everyone)[rank]
        check_dispatched(Case(), op, got, reference)
        output = run_experts(layer, rank, got, reference, experts)
        result = op.combine(output, None, ids)
        assert result[0].shape == (layer.max_tokens, layer.hidden_dim)
        check_combined(layer, result[0][: len(ids)], own, experts)


def handle_kwargs(layer: Layer, rank: int) -> dict[str, Any]:
    """AITER's handle kwargs; our own only where they say something."""
    sample = make_tokens(layer, 0, rank)
    scales = sample.scales if sample.scales is not None and not layer.casts_inside else None
    kwargs: dict[str, Any] = {
        "rank": rank,
        "num_ep_ranks": layer.world_size,
        "input_dtype": torch.bfloat16,
        "quant_dtype": sample.sent.dtype,
        "token_hidden_size": layer.hidden_dim,
        "scale_dim": 0 if scales is None else scales.shape[-1],
        "scale_type_size": 0 if scales is None else scales.dtype.itemsize,
        "max_num_tokens_per_dp_rank": layer.max_tokens,
        "num_local_experts": layer.local_experts(rank),
        "num_experts_per_token": layer.topk,
        "gpu_per_node": layer.world_size,
    }
    if layer.casts_inside:
        kwargs["quant_type"] = FUSED[layer.quantisation]
    if layer.num_experts % layer.world_size:
        kwargs["num_experts"] = layer.num_experts
    if layer.layout != "compact":
        kwargs["layout"] = layer.layout
    return kwargs


def through_the_manager(context: RankContext, layer: Layer) -> None:
    """A program on the EP group, with checks: init_dist_env, its manager, a handle, one layer, and the end."""
    ep_a2a.init_dist_env(
        tensor_model_parallel_size=1,
        rankID=0,
        backend="gloo" if context.device.type == "cpu" else "cpu:gloo,cuda:nccl",
        local_rank=-1 if context.device.index is None else context.device.index,
        data_parallel_size=layer.world_size,
        data_parallel_rank=context.rank,
        all2all_backend="ep_a2a",
    )
    try:
        group = ep_a2a.get_ep_group()
        assert (group.world_size, group.rank_in_group, group.device) == (layer.world_size, context.rank, context.device)
        manager = group.device_communicator.all2all_manager
        assert manager.explain()["kernel"] == "IntraNode"
        kwargs = handle_kwargs(layer, context.rank)
        op = manager.get_handle(kwargs)
        assert manager.get_handle(dict(kwargs)) is op
        run_layer(layer, op, context)
    finally:
        ep_a2a.destroy_dist_env()
    with pytest.raises(ClosedError):
        op.check()
    with pytest.raises(NotInitializedError):
        ep_a2a.get_ep_group()


def by_the_direct_api(context: RankContext, layer: Layer) -> None:
    """A program on the op itself, with checks: shmem from a registered group, config, op, one layer, shmem_finalize."""
    torch._C._distributed_c10d._register_process_group(GROUP_NAME, context.group)
    try:
        # without a device the current GPU is taken, as MORI does
        shmem.shmem_torch_process_group_init(GROUP_NAME, "cpu" if context.device.type == "cpu" else None)
        assert (shmem.shmem_mype(), shmem.shmem_npes()) == (context.rank, layer.world_size)
        sample = make_tokens(layer, 0, context.rank)
        scales = sample.scales if not layer.casts_inside else None
        config = EpDispatchCombineConfig(
            data_type=torch.bfloat16 if layer.casts_inside else sample.sent.dtype,
            rank=context.rank,
            world_size=layer.world_size,
            hidden_dim=layer.hidden_dim,
            scale_dim=0 if scales is None else scales.shape[-1],
            scale_type_size=0 if scales is None else scales.dtype.itemsize,
            max_token_type_size=torch.bfloat16.itemsize,
            max_num_inp_token_per_rank=layer.max_tokens,
            num_experts_per_rank=layer.local_experts(context.rank),
            num_experts_per_token=layer.topk,
            quant_type=FUSED[layer.quantisation] if layer.casts_inside else "none",
            num_experts=layer.num_experts,
            layout=layer.layout,
        )
        op = EpDispatchCombineOp(config)
        run_layer(layer, op, context)
        shmem.shmem_finalize()
        with pytest.raises(ClosedError):
            op.check()
    finally:
        shmem.shmem_finalize()
        torch._C._distributed_c10d._unregister_process_group(GROUP_NAME)
