"""The routing of a dispatch: DeepEP's layout tensors, the ids that our ops route by, and the ranks' counts."""

import torch
import torch.distributed as dist

from ep_a2a import env
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import InputError
from ep_a2a.memory.device_groups import DeviceGroups
from ep_a2a.routing import count_ids, destination_mask, owner_of_experts


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


def exchange_counts(
    groups: DeviceGroups, rank: int, is_sent: torch.Tensor, num_tokens_per_expert: torch.Tensor
) -> tuple[int, int, list[int], torch.Tensor]:
    """Returns the sums of all ranks' counts, by one all-reduce that the host waits for. Collective.

    Args:
        groups: of the ranks. rank: this one.
        is_sent: bool [T, W], where this rank's tokens go.
        num_tokens_per_expert: int32 [num_experts], of this rank's tokens.

    Returns:
        The most tokens of a rank, at least 1; tokens that this rank receives; tokens that each of its experts receives;
        int32 [W, W] on the device, DeepEP's `handle[0]`: tokens that ranks 0 ... i send to rank j.

    Raises:
        RankTimeoutError: on CPU, a rank did not come within EP_A2A_TIMEOUT_SECS.
    """
    num_tokens, num_ranks = is_sent.shape
    # by source rank: its tokens, and those that it sends to each rank
    by_source = torch.zeros(num_ranks, 1 + num_ranks, dtype=torch.int32, device=is_sent.device)
    by_source[rank, 0] = num_tokens
    by_source[rank, 1:] = is_sent.sum(0)
    words = torch.cat([by_source.flatten(), num_tokens_per_expert.to(torch.int32)])
    work = dist.all_reduce(words, group=groups.of(words.device), async_op=True)
    groups.wait(work, words.device, env.TIMEOUT_SECS.get())
    by_source = words[: by_source.numel()].view(by_source.shape)
    on_host, per_expert = by_source.cpu(), words[by_source.numel() :].view(num_ranks, -1)[rank]
    sent_before = by_source[:, 1:].cumsum(0, dtype=torch.int32)
    return max(1, int(on_host[:, 0].max())), int(on_host[:, 1 + rank].sum()), per_expert.tolist(), sent_before
