"""The routing of a dispatch: DeepEP's layout tensors, the ids that our ops route by, and the ranks' counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ep_a2a import env
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import InputError
from ep_a2a.routing import count_ids, destination_mask, owner_of_experts

if TYPE_CHECKING:
    from ep_a2a.memory.device_groups import DeviceGroups


def dispatch_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns the counts of this rank's tokens by rank, node and expert; ids outside [0, num_experts) select nothing.

    Args:
        topk_idx: [T, K], int64 or int32.
        num_experts, num_ranks, num_nodes: over all ranks.

    Returns:
        The first four results of Buffer.get_dispatch_layout.
    """
    check_num_experts(num_experts, num_ranks)
    is_token_in_rank = destination_mask(topk_idx, num_experts, num_ranks)
    per_rank, per_expert = is_token_in_rank.sum(0, dtype=torch.int32), count_ids(topk_idx, 0, num_experts)
    per_node = None
    if num_nodes > 1:
        by_node = is_token_in_rank.view(len(topk_idx), num_nodes, num_ranks // num_nodes)
        per_node = by_node.any(2).sum(0, dtype=torch.int32)
    return per_rank, per_node, per_expert, is_token_in_rank


def routed_ids(topk_idx: torch.Tensor, is_token_in_rank: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns the ids that a dispatch routes by, int32 [T, K]: those of topk_idx whose rank is marked, else -1."""
    owners = owner_of_experts(topk_idx, num_experts, is_token_in_rank.shape[1]).to(torch.int64)
    goes = is_token_in_rank.gather(1, owners.clamp(min=0)) & (owners >= 0)
    return torch.where(goes, topk_idx, -1).to(torch.int32)


def rank_ids(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """Returns ids for a dispatch without topk_idx, int32 [T, W]: the rank where it is marked, else -1."""
    ranks = torch.arange(is_token_in_rank.shape[1], dtype=torch.int32, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, ranks, -1)


def check_num_experts(num_experts: int, num_ranks: int) -> None:
    """Raises InputError unless each rank has the same number of experts."""
    if checked_integer("num_experts", num_experts, 1, kind=InputError) % num_ranks:
        raise InputError(f"num_experts to be a multiple of the {num_ranks} ranks", str(num_experts))


@dataclass(frozen=True)
class Counts:
    """The sizes of a dispatch over all ranks.

    Attributes:
        step_tokens: the most tokens of a rank, at least 1.
        num_recv_tokens: tokens that this rank receives.
        num_recv_per_expert: tokens that each of this rank's experts receives.
        rank_prefix_matrix: int32 [W, W] on the device: tokens that ranks 0 ... i send to rank j, DeepEP's `handle[0]`.
    """

    step_tokens: int
    num_recv_tokens: int
    num_recv_per_expert: list[int]
    rank_prefix_matrix: torch.Tensor


def exchange_counts(
    groups: DeviceGroups, rank: int, is_sent: torch.Tensor, num_tokens_per_expert: torch.Tensor
) -> Counts:
    """Returns the sums of all ranks' counts, by one all-reduce that the host waits for. Collective.

    Args:
        groups: of the ranks. rank: this one.
        is_sent: bool [T, W], where this rank's tokens go.
        num_tokens_per_expert: int32 [num_experts], of this rank's tokens.

    Raises:
        RankTimeoutError: on CPU, a rank did not come within EP_A2A_TIMEOUT_SECS.
    """
    num_tokens, num_ranks = is_sent.shape
    num_experts = num_tokens_per_expert.shape[0]
    device = is_sent.device
    words = torch.zeros(num_ranks * (1 + num_ranks) + num_experts, dtype=torch.int32, device=device)
    tokens, sent, by_expert = _parts(words, num_ranks)
    tokens[rank] = num_tokens
    torch.sum(is_sent, 0, dtype=torch.int32, out=sent[rank])
    by_expert.copy_(num_tokens_per_expert)
    work = dist.all_reduce(words, group=groups.of(device), async_op=True)
    groups.wait(work, device, env.TIMEOUT_SECS.get())
    host_tokens, host_sent, host_by_expert = _parts(words.cpu(), num_ranks)
    per_rank = num_experts // num_ranks
    return Counts(
        max(1, int(host_tokens.max())),
        int(host_sent[:, rank].sum()),
        host_by_expert[rank * per_rank : (rank + 1) * per_rank].tolist(),
        sent.cumsum(0, dtype=torch.int32),
    )


def _parts(words: torch.Tensor, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns views of the exchanged words: tokens by rank [W], from rank to rank [W, W], by expert [num_experts]."""
    end = num_ranks * (1 + num_ranks)
    return words[:num_ranks], words[num_ranks:end].view(num_ranks, num_ranks), words[end:]
