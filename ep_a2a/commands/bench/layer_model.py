"""Makes the weights and the router of the benchmark's MoE layer, and checks results against the dense layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ep_a2a.config import QuantType
from ep_a2a.errors import CheckFailedError
from ep_a2a.quantization import dequantize, quantize
from ep_a2a.reference import expert_mlp_rows
from ep_a2a.routing import expert_ranges

if TYPE_CHECKING:
    from ep_a2a.commands.bench.contender import BenchContext
    from ep_a2a.commands.bench.workload import Workload

WEIGHTS_SEED = 77
MAX_CHECKED_TOKENS = 32
"""Tokens of each rank that are compared with the dense layer, which is slow."""
TOLERANCE = 2e-2
"""Norm of a row's error over the norm of the row: roundings to bf16 between the parts, and of the ranks' sums."""


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


def make_weights(workload: Workload, intermediate_dim: int, context: BenchContext) -> MoEWeights:
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


def check_layer(
    name: str, workload: Workload, gate: Gate, weights: MoEWeights, context: BenchContext, got: torch.Tensor
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
