"""Converts ids, counts and positions between libraries' conventions and this package's.

Functions run on the device and do not wait, unless a docstring says otherwise.
"""

import torch

DROPPED_WEIGHT_BITS = 0x7FC0D0D0
"""Bits of the float32 that marks a slot without an expert: a NaN that no arithmetic makes."""


def valid_ids(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns which slots name an expert: bool of the shape of ids."""
    return (ids >= 0) & (ids < num_experts)


def padded_ids(ids: torch.Tensor, total_recv: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Returns `ids` [R, K] with pad_id in all rows from total_recv [1] on."""
    row = torch.arange(ids.shape[0], device=ids.device)
    return torch.where((row < total_recv)[:, None], ids, pad_id)


def global_ids(local_ids: torch.Tensor, first_expert: int, pad_id: int) -> torch.Tensor:
    """Returns global int32 ids of local ones, with pad_id for -1 (no expert of this rank)."""
    ids = local_ids.to(torch.int32)
    return torch.where(ids >= 0, ids + first_expert, pad_id)


def counts_from_prefix(prefix: torch.Tensor) -> torch.Tensor:
    """Returns the counts [W] of an inclusive prefix sum [W]."""
    return torch.diff(prefix, prepend=prefix.new_zeros(1))


def sources_of_rows(counts_per_source: torch.Tensor) -> torch.Tensor:
    """Returns the source rank of each row, int64 [sum of counts], for rows ordered by source. Synchronises."""
    ranks = torch.arange(counts_per_source.numel(), device=counts_per_source.device)
    return ranks.repeat_interleave(counts_per_source.to(torch.int64))


def positions(sources: torch.Tensor, tokens: torch.Tensor, tokens_per_source: int) -> torch.Tensor:
    """Returns positions int32 [N] of rows that were token `tokens` [N] of rank `sources` [N]."""
    return (sources * tokens_per_source + tokens).to(torch.int32)


def rows_per_source(layout_range: torch.Tensor) -> torch.Tensor:
    """Returns rows per source [W] from DeepEP's ranges int64 [E, W], which are first row << 32 | number of rows."""
    return (layout_range & ((1 << 32) - 1)).sum(0).to(torch.int32)


def routed_ids(ids: torch.Tensor, num_experts: int, own_expert: int) -> torch.Tensor:
    """Returns ids int32 [T, K] that go to the same ranks as `ids` and name an expert in every slot.

    For libraries that cannot drop a slot, and that send a token once per rank. A slot without an expert repeats the
    token's first valid one. A token without any goes to `own_expert`.
    """
    valid = valid_ids(ids, num_experts)
    first = torch.where(valid, 1, 0).argmax(1, keepdim=True)
    fallback = torch.where(valid.any(1, keepdim=True), ids.gather(1, first), own_expert)
    return torch.where(valid, ids, fallback)


def filled_ids(ids: torch.Tensor, num_experts: int, first_expert: int) -> torch.Tensor:
    """Returns ids int32 [T, K]: slots without an expert get experts that the token does not name.

    For libraries that cannot drop a slot and keep room for one row per token and expert. Experts from first_expert on
    are taken; K must not exceed num_experts.
    """
    valid = valid_ids(ids, num_experts)
    # among K candidates, at least as many are unnamed as the token has slots without an expert
    experts = (first_expert + torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)) % num_experts
    taken = (ids[:, :, None] == experts).any(1)
    free_first = experts[taken.to(torch.int8).argsort(dim=1, stable=True)]
    place = ((~valid).cumsum(1) - 1).clamp_(min=0)
    return torch.where(valid, ids, free_first.gather(1, place))


def marked_weights(weights: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Returns weights float32 [T, K] with a mark in slots without an expert; `unmarked` reads it."""
    return torch.where(valid, weights.view(torch.int32), DROPPED_WEIGHT_BITS).view(torch.float32)


def unmarked(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns received ids int32 and weights [R, K], with -1 and 0 in the slots that `marked_weights` marked."""
    dropped = weights.view(torch.int32) == DROPPED_WEIGHT_BITS
    return torch.where(dropped, -1, ids), torch.where(dropped, 0, weights)
