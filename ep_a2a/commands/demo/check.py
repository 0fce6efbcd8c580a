"""Compares the demo's output with a dense MoE in one process, with a bound for every element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ep_a2a.commands.demo.model import expert_weights
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.reference import dense_moe
from ep_a2a.routing import owner_of_experts, traffic_matrix

if TYPE_CHECKING:
    from ep_a2a.commands.demo.settings import DemoSettings
    from ep_a2a.commands.demo.worker import RankResult

BFLOAT16_ROUNDOFF = 2.0**-8
"""Largest relative error of rounding to bfloat16, which keeps 8 significant bits."""
FLOAT32_NOISE = 2.0**-16
"""Bound, relative to a row's largest element, of the effect of another order of float32 sums."""


@dataclass(frozen=True)
class Comparison:
    """The layer's output against the dense model's.

    Attributes:
        max_error: largest absolute difference. tolerance: the bound that holds for that very element.
        worst_share: the largest difference in shares of its own element's bound; a mismatch above 1.
        max_output: largest magnitude of the dense model's output.
        max_change_by_cast: how far the fp8 cast moves the dense model's output; 0 without a cast.
        rows_as_routed: whether each rank received from each rank as many rows as the routing says.
        matches: whether all is as it should be.
    """

    max_error: float
    tolerance: float
    worst_share: float
    max_output: float
    max_change_by_cast: float
    rows_as_routed: bool
    matches: bool


def rows_by_source(results: list[RankResult], num_experts: int) -> torch.Tensor:
    """Returns the rows from each rank to each, [source, destination], as the receiving ranks counted them.

    Across nodes they count by the local rank through which rows come. Where these sums equal those of the routing, the
    result is the routing; else it is zeros, which no comparison accepts.
    """
    counted = torch.tensor([result.rows_received for result in results]).T
    num_counts, num_ranks = counted.shape
    if num_counts == num_ranks:
        return counted
    routed = traffic_matrix([result.ids for result in results], num_experts, num_ranks)
    by_local_rank = routed.view(-1, num_counts, num_ranks).sum(0)
    return routed if torch.equal(counted, by_local_rank) else torch.zeros_like(routed)


def compare(settings: DemoSettings, results: list[RankResult], rows: torch.Tensor) -> Comparison:
    """Compares the ranks' output with a dense model that sees the whole batch in one process.

    The dense model gets the experts' input: with a cast, the tokens cast to fp8 and back, bit for bit. Both compute
    in float32, so they differ by bfloat16 roundings only: each rank's partial sum y_r is rounded once, and so is their
    sum. Hence |error| <= u * sum |y_r| + u * (|y| + u * sum |y_r|), u = 2^-8, plus float32 noise.
    Across nodes the sum of each node is rounded in between: u * sum |y_r| more.
    """
    tokens, weights, ids, output = (
        torch.cat([getattr(result, name) for result in results]) for name in ("tokens", "weights", "ids", "output")
    )
    projections = expert_weights(range(settings.num_experts), settings.hidden_dim)
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
    routed = traffic_matrix([result.ids for result in results], settings.num_experts, settings.num_ranks)
    rows_as_routed = torch.equal(rows, routed)
    return Comparison(
        max_error=float(error.flatten()[worst]),
        tolerance=float(bound.flatten()[worst]),
        worst_share=float((error / bound).nan_to_num().max()),
        max_output=float(expected.abs().max()),
        max_change_by_cast=float((expected - uncast).abs().max()),
        rows_as_routed=rows_as_routed,
        matches=rows_as_routed and bool((error <= bound).all()),
    )
