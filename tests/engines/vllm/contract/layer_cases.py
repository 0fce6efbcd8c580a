"""Bodies of the layer tests: a MoE layer of real vLLM on two ranks, its tokens carried by our prepare/finalize.

They run on every rank of a RankPool whose processes can import vLLM. Weights and tokens come from seeds, so every rank
can compute its result by itself, densely and in float32.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ep_a2a.config import FP8_DTYPE, num_owned_experts
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.routing import expert_ranges
from ep_a2a.testing import RankContext
from tests.engines.vllm.contract.checks import use_cpu

INTERMEDIATE = 32
BF16_TOLERANCE = 2e-2
FP8_TOLERANCE = 7e-2
CASTS = {
    "per_token": "fp8_per_token",
    "per_block": "fp8_per_1x128",
    "per_block_rounded": "fp8_per_1x128",
    "mxfp8": "mxfp8",
}


@dataclass(frozen=True)
class Layer:
    """A layer and what its ranks bring.

    quant: activations of the experts: none, per_token, per_block, per_block_rounded (scales are powers of two), or
        per_tensor (one scale of all rows, by vLLM's helper).
    reduce: who adds a row's experts: the experts ("NoOP"), or finalize ("Contiguous", "Delegate").
    ids: "random", "padding" (rows of -1), "holes" (a -1 beside valid ids), or "first rank" (the last gets no token).
    batched: experts take rows by expert, and combine weighs and adds.
    with_map: expert_map is passed; on CPU rows then carry local ids. Without, they carry global ones, as on GPUs.
    scale: of the tokens' elements.
    padding: last columns with which vLLM pads the tokens' hidden size.
    skip_forward_padding: tokens come without them. has_unpadded_output: the experts leave them out of their rows.
    """

    tokens: tuple[int, int] = (5, 3)
    num_experts: int = 8
    topk: int = 2
    hidden: int = 128
    max_tokens: int = 16
    quant: str = "none"
    reduce: str = "NoOP"
    batched: bool = False
    weight_on_input: bool = False
    ids: str = "random"
    with_map: bool = False
    seed: int = 0
    scale: float = 1.0
    padding: int = 0
    skip_forward_padding: bool = False
    has_unpadded_output: bool = False

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's tokens, weights and ids."""
        generator = torch.Generator().manual_seed(1000 + 10 * self.seed + rank)
        num_tokens = self.tokens[rank]
        tokens = torch.randn(num_tokens, self.hidden - self.padding, generator=generator) * self.scale
        weights = torch.rand(num_tokens, self.topk, generator=generator) + 0.1
        most = expert_ranges(self.num_experts, 2)[0][1] if self.ids == "first rank" else self.num_experts
        ids = torch.rand(num_tokens, most, generator=generator).argsort(1)[:, : self.topk].to(torch.int32)
        if self.ids == "padding":
            ids[::2] = -1
        if self.ids == "holes":
            ids[::2, 0] = -1
        return tokens.to(torch.bfloat16), weights, ids

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all experts: [E, N, H] and [E, H, N]."""
        generator = torch.Generator().manual_seed(7)
        up = torch.randn(self.num_experts, INTERMEDIATE, self.hidden, generator=generator) / self.hidden**0.5
        down = torch.randn(self.num_experts, self.hidden, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
        return up, down

    def expected(self, rank: int) -> torch.Tensor:
        """The dense layer in float32, on tokens as the experts get them."""
        tokens, weights, ids = self.inputs(rank)
        up, down = self.weights()
        if self.weight_on_input:
            tokens = tokens * weights.to(tokens.dtype)
        tokens = torch.nn.functional.pad(tokens, (0, self.padding))
        rows = tokens.float()
        if self.quant in CASTS:
            scale_format = "float32_power_of_two" if self.quant == "per_block_rounded" else "float32"
            rows = dequantize(*quantize(tokens, CASTS[self.quant], scale_format), CASTS[self.quant])
        result = torch.zeros_like(rows)
        for slot in range(self.topk):
            valid = ids[:, slot] >= 0
            expert = ids[:, slot].clamp(min=0).long()
            weight = torch.ones(len(ids)) if self.weight_on_input else weights[:, slot]
            result += (valid * weight)[:, None] * mlp(rows, up[expert], down[expert])
        return result[:, : self.hidden - self.padding]


def mlp(rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Rows [R, H] through an expert each: up [R, N, H], down [R, H, N]."""
    hidden = torch.nn.functional.silu(torch.einsum("rh,rnh->rn", rows, up))
    return torch.einsum("rn,rhn->rh", hidden, down)


@functools.cache
def experts_class() -> type:
    """Experts of vLLM in plain torch. Made here, since its base is vLLM's."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

    class Experts(mk.FusedMoEExpertsModular):
        def __init__(self, case: Layer, moe: Any, quant_config: Any, rank: int) -> None:
            self.case, self.moe_config, self.quant_config = case, moe, quant_config
            self.first, self.end = expert_ranges(case.num_experts, 2)[rank]
            self.seen: list[SimpleNamespace] = []
            self.error: Exception | None = None

        def activation_format(self) -> Any:
            formats = mk.FusedMoEActivationFormat
            return formats.BatchedExperts if self.case.batched else formats.Standard

        def output_hidden_dim(self, hidden: int) -> int:
            return self.case.hidden - self.case.padding if self.case.has_unpadded_output else hidden

        def workspace_shapes(self, rows: int, *shape: Any) -> Any:
            hidden, topk = self.output_hidden_dim(shape[1]), shape[2]
            if self.case.batched:
                # as of all batched experts of vLLM
                return (0,), (0,), (shape[4], self.max_num_tokens * self.num_dispatchers, hidden)
            return (0,), (0,), (rows, hidden) if self.case.reduce == "NoOP" else (rows, topk, hidden)

        def finalize_weight_and_reduce_impl(self) -> Any:
            kind = "Delegate" if self.case.batched else self.case.reduce
            return getattr(topk_weight_and_reduce, f"TopKWeightAndReduce{kind}")()

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
            self.seen.append(SimpleNamespace(rows=hidden_states.clone(), output=output, **given))
            if self.error is not None:
                raise self.error
            assert given["expert_tokens_meta"] is None or self.case.batched or hasattr(self, "experts")
            rows = self.dequantized(hidden_states, given["a1q_scale"])
            if self.case.batched:
                counts = given["expert_tokens_meta"].expert_num_tokens.tolist()
                for expert, (count, *weights) in enumerate(zip(counts, given["w1"], given["w2"], strict=True)):
                    each = mlp(rows[expert, :count], *(matrix.expand(count, -1, -1) for matrix in weights))
                    output[expert, :count] = each[:, : output.shape[-1]]
                return
            slots, is_local = self.computed(rows, given["topk_ids"])
            slots = slots[:, :, : output.shape[-1]]
            if self.case.reduce != "NoOP":
                output.copy_(slots)
                return
            weights = torch.ones(()) if given["apply_router_weight_on_input"] else given["topk_weights"][:, :, None]
            output.copy_(torch.where(is_local[:, :, None], weights * slots, 0.0).sum(1))

        def computed(self, rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Each slot's expert on its row [R, K, H], zeros for experts of other ranks, and which are of this one."""
            up, down = self.case.weights()
            first = 0 if self.case.with_map else self.first
            is_local = (ids >= first) & (ids < first + self.end - self.first)
            assert bool(is_local.all()) or not self.case.with_map
            expert = torch.where(is_local, ids - first + self.first, self.first).long()
            slots = torch.stack([mlp(rows, up[chosen], down[chosen]) for chosen in expert.unbind(1)], 1)
            return torch.where(is_local[:, :, None], slots, 0.0), is_local

        def dequantized(self, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
            if self.case.quant == "none":
                assert scales is None
                return rows.float()
            assert rows.dtype == FP8_DTYPE
            if self.case.quant == "per_tensor":
                return rows.float() * scales
            assert scales is not None
            assert rows.shape[:-1] == scales.shape[:-1]
            return dequantize(rows.flatten(0, -2), scales.flatten(0, -2), CASTS[self.case.quant]).view(rows.shape)

    # how vLLM would choose among experts
    unused = dict.fromkeys(Experts.__abstractmethods__, staticmethod(lambda *_: True))
    return type("Experts", (Experts,), unused)


def quantize_whole_tensor(rows: torch.Tensor, scale: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, Any]:
    """In place of vLLM's helper, which is compiled code."""
    assert scale is None
    assert options["quant_dtype"] == FP8_DTYPE
    assert not options["per_act_token_quant"]
    assert options["block_shape"] is None
    found = (rows.float().abs().max() / 448).clamp(min=1e-12).reshape(1)
    return (rows.float() / found).to(FP8_DTYPE), found


def workspaces(*wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """In place of vLLM's manager of scratch memory."""
    return [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]


@functools.cache
def _set_up() -> None:
    use_cpu()
    import vllm._custom_ops as ops
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import modular_kernel

    # that of older versions wants an accelerator
    modular_kernel.current_workspace_manager = lambda: SimpleNamespace(get_simultaneous=workspaces)
    one = SimpleNamespace(rank_in_group=0, world_size=1)
    parallel_state.get_dp_group = parallel_state.get_tp_group = lambda: one
    ops.moe_sum = lambda slots, output: output.copy_(slots.float().sum(1))
    from ep_a2a.integrations.vllm import prepare_finalize

    prepare_finalize.moe_kernel_quantize_input = quantize_whole_tensor


@contextlib.contextmanager
def manager_of(context: RankContext, num_micro_batches: int = 1, **options: Any) -> Iterator[Any]:
    """The manager that the expert-parallel group's communicator would carry."""
    _set_up()
    from ep_a2a.integrations.vllm.manager import VllmAll2AllManager

    communicator = SimpleNamespace(cpu_group=context.group, device=context.device, device_group=context.group)
    manager = VllmAll2AllManager(communicator, None, num_micro_batches, **options)
    try:
        yield manager
    finally:
        manager.destroy()


def quant_config_of(case: Layer) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    if case.quant == "none":
        return FusedMoEQuantConfig.make(None)
    if case.quant == "mxfp8":
        return FusedMoEQuantConfig.make("mxfp8", block_shape=[1, 32], is_scale_swizzled=False)
    blocks = [128, 128] if case.quant.startswith("per_block") else None
    return FusedMoEQuantConfig.make(FP8_DTYPE, per_act_token_quant=case.quant == "per_token", block_shape=blocks)


def kernel_of(case: Layer, manager: Any, sp_size: int = 1, moe: Any = None) -> Any:
    """vLLM's FusedMoEKernel of our prepare/finalize and the experts above; `moe` is that of a layer built before."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.utils import deep_gemm

    from ep_a2a.integrations.vllm.prepare_finalize import BatchedPrepareAndFinalize, EpA2APrepareAndFinalize

    deep_gemm.is_deep_gemm_e8m0_used = lambda: case.quant == "per_block_rounded"
    moe = moe or SimpleNamespace(
        hidden_dim=case.hidden,
        in_dtype=torch.bfloat16,
        num_experts=case.num_experts,
        experts_per_token=case.topk,
        num_local_experts=num_owned_experts(case.num_experts, 2, manager.rank),
        moe_parallel_config=SimpleNamespace(sp_size=sp_size, dp_size=2, use_ep=True),
    )
    experts = experts_class()(case, moe, quant_config_of(case), manager.rank)
    kind = BatchedPrepareAndFinalize if case.batched else EpA2APrepareAndFinalize
    return mk.FusedMoEKernel(kind(manager, moe, case.max_tokens), experts)


def run_kernel(case: Layer, kernel: Any, rank: int, rows: torch.Tensor | None = None) -> torch.Tensor:
    """One step, as vLLM's layers make it; rows: numbers of the tokens that it has, None = all."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    tokens, weights, ids = (each if rows is None else each[rows] for each in case.inputs(rank))
    first, end = expert_ranges(case.num_experts, 2)[rank]
    local = torch.full((case.num_experts,), -1, dtype=torch.int32)
    local[first:end] = torch.arange(end - first, dtype=torch.int32)
    up, down = (all_experts[first:end] for all_experts in case.weights())
    before = tokens.clone()
    result = kernel.apply(
        hidden_states=padded_by_vllm(case, tokens) if case.padding else tokens,
        w1=up,
        w2=down,
        topk_weights=weights,
        topk_ids=ids,
        activation=MoEActivation.SILU,
        global_num_experts=case.num_experts,
        expert_map=local if case.with_map else None,
        apply_router_weight_on_input=case.weight_on_input,
    )
    assert torch.equal(tokens, before), "the caller's tokens have changed"
    return without_padding(case, tokens, result) if case.padding else result


def padded_by_vllm(case: Layer, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens as vLLM's layer gives them to its kernel."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    layer = SimpleNamespace(_quant_method=case, moe_config=SimpleNamespace(hidden_dim=case.hidden))
    layer.routed_output_transform = None
    return MoERunner._maybe_pad_hidden_states(layer, None, tokens)[0]


def without_padding(case: Layer, tokens: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The result as vLLM's layer returns it; its shape must be the one that vLLM has told torch.compile."""
    from vllm.model_executor.layers.fused_moe.runner import moe_runner

    hidden = case.hidden - case.padding
    unpadded = hidden if case.has_unpadded_output else 0
    told = moe_runner._moe_forward_fake(padded_by_vllm(case, tokens), tokens, None, None, "", unpadded)
    assert result.shape == told.shape
    return result[:, :hidden]


def check_result(case: Layer, result: torch.Tensor, rank: int, rows: torch.Tensor | None = None) -> None:
    expected = case.expected(rank)
    if rows is not None:
        expected = expected[rows]
    assert result.shape == expected.shape
    assert result.dtype == torch.bfloat16
    largest = expected.abs().max().item() if expected.numel() else 1.0
    tolerance = FP8_TOLERANCE if case.quant == "per_tensor" else BF16_TOLERANCE
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance * largest)


def run_and_check(case: Layer, kernel: Any, rank: int) -> None:
    """One step, whose result must be that of the dense layer."""
    check_result(case, run_kernel(case, kernel, rank), rank)


@contextlib.contextmanager
def step_of(tokens: tuple[int, ...] | None) -> Iterator[None]:
    """Within, vLLM tells the tokens of each data-parallel rank, or nothing about them."""
    from vllm.config import VllmConfig
    from vllm.forward_context import DPMetadata, create_forward_context, override_forward_context

    metadata = None if tokens is None else DPMetadata(torch.tensor(tokens, dtype=torch.int32))
    with override_forward_context(create_forward_context(None, VllmConfig(), metadata)):
        yield
