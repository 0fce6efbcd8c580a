"""Compares the demo's output with a dense MoE in one process, with a bound for every element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.demo.model import expert_weights
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.reference import dense_moe
from ep_a2a.routing import owner_of_experts

if TYPE_CHECKING:
    from ep_a2a.commands.demo.settings import DemoSettings
    from ep_a2a.commands.demo.worker import RankResult

BFLOAT16_ROUNDOFF = 2.0**-8
"""Largest relative error of rounding to bfloat16, which keeps 8 significant bits."""
FLOAT32_NOISE = 2.0**-16
"""Bound, relative to a row's largest element, of the effect of another order of float32 sums."""


def compare(settings: DemoSettings, results: list[RankResult], *, rows_as_routed: bool) -> dict[str, Any]:
    """Compares the ranks' output with a dense model that sees the whole batch in one process.

    The dense model gets the experts' input: with a cast, the tokens cast to fp8 and back, bit for bit. Both compute
    in float32, so they differ by bfloat16 roundings only: each rank's partial sum y_r is rounded once, and so is their
    sum. Hence |error| <= u * sum |y_r| + u * (|y| + u * sum |y_r|), u = 2^-8, plus float32 noise.
    Across nodes the sum of each node is rounded in between: u * sum |y_r| more.

    Args:
        settings, results: of the run.
        rows_as_routed: whether each rank received from each rank as many rows as the routing says.

    Returns:
        max_error: largest absolute difference. tolerance: the bound that holds for that very element.
        worst_share: the largest difference in shares of its own element's bound; a mismatch above 1.
        max_output: largest magnitude of the dense model's output.
        max_change_by_cast: how far the fp8 cast moves the dense model's output; 0 without a cast.
        rows_as_routed: as given.
        matches: whether rows are as routed and every element is within its bound.
    """
    tokens, weights, ids, output = (
        torch.cat([getattr(result, name) for result in results]) for name in ("tokens", "weights", "ids", "output")
    )
    projections = expert_weights(range(settings.num_experts), settings.hidden_dim, settings.seed)
    seen = tokens.to(torch.float32)
    if settings.quant_type != "none":
        seen = dequantize(*quantize(tokens, settings.quant_type), settings.quant_type)
    expected = dense_moe(seen, weights, ids, *projections)
    uncast = expected if settings.quant_type == "none" else dense_moe(tokens, weights, ids, *projections)

    owners = owner_of_experts(ids, settings.num_experts, settings.num_ranks)
    partial = torch.zeros_like(expected)
    for rank in range(settings.num_ranks):
        partial += dense_moe(seen, weights, torch.where(owners == rank, ids, -1), *projections).abs()
    bound = BFLOAT16_ROUNDOFF * (partial + expected.abs() + BFLOAT16_ROUNDOFF * partial)
    if settings.gpus_per_node is not None and settings.gpus_per_node < settings.num_ranks:
        bound += BFLOAT16_ROUNDOFF * partial
    bound += FLOAT32_NOISE * partial.amax(dim=1, keepdim=True)
    # NaN counts as the largest number: it must not compare as equal, and JSON knows neither NaN nor infinity.
    error = (output.to(torch.float32) - expected).abs().nan_to_num(nan=torch.finfo(torch.float32).max)
    worst = int(error.argmax())
    return {
        "max_error": float(error.flatten()[worst]),
        "tolerance": float(bound.flatten()[worst]),
        "worst_share": float((error / bound).nan_to_num().max()),
        "max_output": float(expected.abs().max()),
        "max_change_by_cast": float((expected - uncast).abs().max()),
        "rows_as_routed": rows_as_routed,
        "matches": rows_as_routed and bool((error <= bound).all()),
    }
