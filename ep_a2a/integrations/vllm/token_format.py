"""The format in which a MoE layer's tokens travel, and the handle kwargs of its op. Imports nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep_a2a.config import FP8_DTYPE, FP8_GROUP_SIZE

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TokenFormat:
    """The casts of tokens before they travel, and their quantisation afterwards.

    Attributes:
        cast: quant_type of the op: the fp8 cast inside dispatch; "none" sends rows as they are.
        scale_format: format of that cast's scales.
        quantize_after: vLLM's helper quantises received rows, because dispatch has no such cast.
        by_whole_tensor: that helper takes one scale from all rows, so rows without a token must be zeros.
    """

    cast: str
    scale_format: str = "float32"
    quantize_after: bool = False
    by_whole_tensor: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of received rows where dispatch casts them, else None."""
        return None if self.cast == "none" else FP8_DTYPE


RAW = TokenFormat("none")


def token_format_of(
    quant_config: Any, hidden_dim: int, *, expects_unquantized: bool, powers_of_two: bool
) -> TokenFormat:
    """Returns the token format for experts with this FusedMoEQuantConfig.

    Args:
        quant_config: vLLM's; None is unquantised.
        hidden_dim: elements of a row.
        expects_unquantized: the experts quantise themselves (vLLM's defer_input_quant).
        powers_of_two: vLLM's block quantisation rounds scales up to powers of two on this GPU.
    """
    if quant_config is None or quant_config.quant_dtype is None or expects_unquantized:
        return RAW
    transposed = getattr(quant_config, "is_scale_transposed", False)
    if quant_config.quant_dtype == FP8_DTYPE and quant_config.a1_scale is None:
        block = quant_config.block_shape
        if block is None and quant_config.per_act_token_quant:
            return TokenFormat("fp8_per_token")
        fits = block is not None and block[1] == FP8_GROUP_SIZE and hidden_dim % FP8_GROUP_SIZE == 0
        if fits and not transposed:
            return TokenFormat("fp8_per_1x128", "float32_power_of_two" if powers_of_two else "float32")
    per_row = quant_config.per_act_token_quant or quant_config.block_shape is not None
    has_scale = quant_config.a1_scale is not None or quant_config.a1_gscale is not None
    grouped = isinstance(quant_config.quant_dtype, str)  # "nvfp4", "mxfp8", ...: a scale per group of a row
    return TokenFormat("none", quantize_after=True, by_whole_tensor=not (per_row or has_scale or grouped))


def tokens_per_rank(num_tokens: int, sequence_parallel_size: int) -> int:
    """Returns the most tokens of each rank where `sequence_parallel_size` ranks share a replica's."""
    return -(-num_tokens // sequence_parallel_size)


def micro_batch_tokens(num_tokens: int, num_micro_batches: int) -> int:
    """Returns the most tokens of the last of so many micro-batches, which takes what the others leave."""
    return num_tokens // num_micro_batches + num_micro_batches - 1


def handle_kwargs(
    token_format: TokenFormat,
    *,
    rank: int,
    world_size: int,
    dtype: torch.dtype,
    hidden_dim: int,
    topk: int,
    num_experts: int,
    num_local_experts: int,
    max_num_tokens: int,
) -> dict[str, Any]:
    """Returns the kwargs with which a layer, and `ep-a2a plan`, ask `get_handle` for their op.

    Args:
        token_format: how the layer's tokens travel.
        rank, world_size: of the expert-parallel group.
        dtype: of the layer's activations.
        hidden_dim: elements of a row as the experts want it, with vLLM's padding.
        topk: experts per token.
        num_experts: over all ranks, redundant ones included. num_local_experts: this rank's.
        max_num_tokens: the most tokens that a rank brings to a step.
    """
    return {
        "rank": rank,
        "num_ep_ranks": world_size,
        "input_dtype": dtype,
        "quant_dtype": token_format.dtype,
        "quant_type": token_format.cast,
        "scale_format": token_format.scale_format,
        "token_hidden_size": hidden_dim,
        "max_num_tokens_per_dp_rank": max_num_tokens,
        "num_local_experts": num_local_experts,
        "num_experts": num_experts,
        "num_experts_per_token": topk,
        "layout": "rank_major",
        "compiled_calls": "serving",
    }
