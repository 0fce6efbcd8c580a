"""How a layer's tokens travel, the handle kwargs of its op, and the bound of a step. Imports nothing of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ep_a2a.config import FP8_DTYPE
from ep_a2a.errors import TooManyTokensError


@dataclass(frozen=True)
class TokenFormat:
    """The casts of tokens before they travel, and their quantisation afterwards.

    Attributes:
        cast: quant_type of the op: the fp8 cast inside dispatch; "none" sends rows as they are.
        scale_format: format of that cast's scales.
        quantize_after: the engine's function quantises received rows, because dispatch has no such cast.
        by_whole_tensor: that function takes one scale from all rows, so rows without a token must be zeros.
        column_major: in layout expert_major, scales lie as DeepGEMM's masked products read them.
        advice: for the log: the engine's option by which fewer bytes would travel, and why; "" where there is none.
    """

    cast: str
    scale_format: str = "float32"
    quantize_after: bool = False
    by_whole_tensor: bool = False
    column_major: bool = False
    advice: str = field(default="", compare=False)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of received rows where dispatch casts them, else None."""
        return None if self.cast == "none" else FP8_DTYPE


RAW = TokenFormat("none")


@dataclass(frozen=True)
class LayerShape:
    """The sizes and the dtype of what a layer exchanges. Layers of one shape and token format share their ops.

    Attributes:
        dtype: of the layer's activations.
        hidden_dim: elements of a row as the experts want it, with the engine's padding.
        topk: experts per token.
        num_experts: over all ranks, redundant ones included. num_local_experts: this rank's.
        max_tokens: the most tokens that a rank brings to a step.
        layout: of the op.
        multiple: max_tokens is one of this, and every bound of a step.
        local_ids: received ids count this rank's experts, and are -1 in other slots and in rows without a token.
    """

    dtype: torch.dtype
    hidden_dim: int
    topk: int
    num_experts: int
    num_local_experts: int
    max_tokens: int
    layout: str = "rank_major"
    local_ids: bool = False
    multiple: int = 1

    def of_micro_batch(self, num_micro_batches: int) -> LayerShape:
        """Returns the shape for the last of so many micro-batches of a step, which takes what the others leave."""
        most = self.max_tokens // num_micro_batches + num_micro_batches - 1
        return replace(self, max_tokens=rounded_up(most, self.multiple))


def handle_kwargs(token_format: TokenFormat, shape: LayerShape, *, rank: int, world_size: int) -> dict[str, Any]:
    """Returns the kwargs with which a layer, and `ep-a2a plan`, ask `get_handle` for their op.

    Args:
        token_format: how the layer's tokens travel. shape: of the layer.
        rank, world_size: of the expert-parallel group.
    """
    return {
        "rank": rank,
        "num_ep_ranks": world_size,
        "input_dtype": shape.dtype,
        "quant_dtype": token_format.dtype,
        "quant_type": token_format.cast,
        "scale_format": token_format.scale_format,
        "token_hidden_size": shape.hidden_dim,
        "max_num_tokens_per_dp_rank": shape.max_tokens,
        "num_local_experts": shape.num_local_experts,
        "num_experts": shape.num_experts,
        "num_experts_per_token": shape.topk,
        "column_major_scales": token_format.column_major,
        "layout": shape.layout,
        "local_ids": shape.local_ids,
        "compiled_calls": "serving",
    }


def tokens_per_rank(num_tokens: int, sharing: int) -> int:
    """Returns the most tokens of each rank where `sharing` ranks share a replica's."""
    return -(-num_tokens // sharing)


def rounded_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple that is not less."""
    return -(-number // multiple) * multiple


def agreed_bound(num_tokens: int | None, sharing: int, max_tokens: int, option: str) -> int:
    """Returns the most tokens that any rank brings to this step, at least 1.

    Args:
        num_tokens: the largest number of a replica's tokens, which the engine tells all ranks alike; None where it
            tells none, as in a warm-up: the result is `max_tokens`.
        sharing: ranks that share a replica's tokens.
        max_tokens: the bound of every step.
        option: the engine's option that raises this limit.

    Raises:
        TooManyTokensError: a rank brings more than `max_tokens`. All ranks raise it, so none waits for another.
    """
    if num_tokens is None:
        return max_tokens
    tokens = tokens_per_rank(num_tokens, sharing)
    if tokens > max_tokens:
        raise TooManyTokensError(f"at most {max_tokens} tokens of each rank", str(tokens), f"Raise {option}.")
    return max(1, tokens)


def agreed_bounds(counts: Sequence[int] | None, sharing: int, max_tokens: int, option: str) -> int | tuple[int, ...]:
    """Returns `agreed_bound` of the replicas' `counts` where it is that of every rank, else the bound of each rank.

    Ranks that share a replica's tokens are neighbours in the group. Other arguments and errors: see `agreed_bound`.
    """
    bound = agreed_bound(max(counts) if counts else None, sharing, max_tokens, option)
    shares = tuple(tokens_per_rank(count, sharing) for count in counts or () for _ in range(sharing))
    return shares if shares and min(shares) < max(shares) else bound
