"""Which rank owns which expert, how much traffic a routing causes, and routings to test and demonstrate with.

Ownership is linear as in vLLM: rank r's experts are contiguous, and the first `num_experts % world_size` ranks own one
more. An expert id outside `[0, num_experts)` is a dropped slot.
"""

from collections.abc import Callable, Sequence

import torch

from ep_a2a.config import num_owned_experts
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import DtypeError, ShapeError, TopKError

RoutingCase = Callable[[int, int, int, int, torch.Generator], torch.Tensor]
"""A routing: (num_tokens T, topk K, num_experts, world_size, CPU generator) -> ids int32 `[T, K]`, -1 = dropped."""


def expert_ranges(num_experts: int, world_size: int) -> list[tuple[int, int]]:
    """Each rank's experts as (first, one past last); a rank without experts has an empty range.

    Raises:
        ConfigError: num_experts is negative or world_size is not positive.
    """
    _require_counts(num_experts, world_size)
    ranges = []
    start = 0
    for rank in range(world_size):
        end = start + num_owned_experts(num_experts, world_size, rank)
        ranges.append((start, end))
        start = end
    return ranges


def owner_of_experts(ids: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """The rank that owns each expert.

    Args:
        ids: expert ids, int32 or int64, any shape and any value.
        num_experts: experts over all ranks.
        world_size: ranks.

    Returns:
        int32, shape of ids; -1 where the id is outside `[0, num_experts)`.

    Raises:
        DtypeError: ids is neither int32 nor int64.
        ConfigError: num_experts is negative or world_size is not positive.
    """
    _require_counts(num_experts, world_size)
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError("expert ids of dtype torch.int32 or torch.int64", str(ids.dtype))
    valid = (ids >= 0) & (ids < num_experts)
    # Invalid ids leave before the division: -1 // n is 0 in device code and -1 here.
    expert = torch.where(valid, ids, 0)
    share, num_larger_ranks = divmod(num_experts, world_size)
    in_larger_ranks = num_larger_ranks * (share + 1)
    larger = expert // (share + 1)
    # With fewer experts than ranks the second part is empty and its divisor 0.
    smaller = num_larger_ranks + (expert - in_larger_ranks) // max(share, 1)
    owner = torch.where(expert < in_larger_ranks, larger, smaller)
    return torch.where(valid, owner, -1).to(torch.int32)


def destination_mask(ids: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """Which ranks each token goes to.

    Args:
        ids: expert ids `[T, K]`, int32 or int64.
        num_experts: experts over all ranks.
        world_size: W, ranks.

    Returns:
        bool `[T, W]`; a row is all False where every slot is dropped.

    Raises:
        ShapeError: ids has not two dimensions.
        DtypeError, ConfigError: as `owner_of_experts` raises them.
    """
    _require_matrix("ids", ids)
    owners = owner_of_experts(ids, num_experts, world_size).to(torch.int64)
    # Dropped slots are collected in one more column, which is cut off.
    columns = torch.where(owners >= 0, owners, world_size)
    mask = torch.zeros(ids.shape[0], world_size + 1, dtype=torch.bool, device=ids.device)
    return mask.scatter_(1, columns, torch.ones_like(columns, dtype=torch.bool))[:, :world_size]


def count_ids(ids: torch.Tensor, first: int, num: int) -> torch.Tensor:
    """Counts each of the ids first ... first + num - 1: int32 `[num]`. On the device, without waiting.

    Args:
        ids: of any shape and integer dtype; others than these are not counted.
        first: the lowest id that is counted.
        num: how many ids are counted.
    """
    place = ids.flatten().to(torch.int64) - first
    # One more place counts the other ids, and is cut off.
    place = torch.where((place >= 0) & (place < num), place, num)
    counts = torch.zeros(num + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))[:num]


def num_distinct_ranks(ids: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    """Ranks each token goes to, int32 `[T]`; arguments and errors are those of `destination_mask`."""
    return destination_mask(ids, num_experts, world_size).sum(1, dtype=torch.int32)


def traffic_matrix(
    ids_per_rank: Sequence[torch.Tensor], num_experts: int, world_size: int, *, deduplicate: bool = True
) -> torch.Tensor:
    """Rows that each source rank sends to each destination rank, its own included.

    Args:
        ids_per_rank: W tensors `[T_r, K]` of expert ids, by source rank.
        num_experts: experts over all ranks.
        world_size: W, ranks.
        deduplicate: True counts a token once per distinct rank (as dispatch sends it), False once per valid slot.

    Returns:
        int64 `[W, W]`, source by destination.

    Raises:
        ShapeError: there are not W tensors, or one has not two dimensions.
        DtypeError, ConfigError: as `owner_of_experts` raises them.
    """
    if len(ids_per_rank) != world_size:
        raise ShapeError(f"one ids tensor for each of {world_size} ranks", str(len(ids_per_rank)))
    matrix = torch.zeros(world_size, world_size, dtype=torch.int64)
    for source, ids in enumerate(ids_per_rank):
        _require_matrix("ids", ids)
        if deduplicate:
            matrix[source] = destination_mask(ids, num_experts, world_size).sum(0)
        else:
            owners = owner_of_experts(ids, num_experts, world_size)
            matrix[source] = torch.bincount(owners[owners >= 0], minlength=world_size)
    return matrix


def softmax_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A router: softmax over the experts in float32, then the k largest, not renormalised.

    Args:
        logits: floating point `[T, E]`.
        k: experts per token, 1 <= k <= E.

    Returns:
        weights float32 `[T, k]` in descending order and expert ids int32 `[T, k]`; of equal weights the lower id first.

    Raises:
        DtypeError: logits is not floating point.
        ShapeError: logits has not two dimensions.
        TopKError: k is outside [1, E].
    """
    _require_matrix("logits", logits)
    if not logits.is_floating_point():
        raise DtypeError("logits of a floating point dtype", str(logits.dtype))
    if not 1 <= k <= logits.shape[1]:
        raise TopKError(f"k between 1 and the {logits.shape[1]} experts", str(k))
    # A stable sort, not torch.topk: topk leaves the order of equal weights to the device.
    weights, ids = torch.softmax(logits.to(torch.float32), dim=1).sort(dim=1, descending=True, stable=True)
    return weights[:, :k].contiguous(), ids[:, :k].to(torch.int32)


def _require_counts(num_experts: int, world_size: int) -> None:
    checked_integer("num_experts", num_experts, 0)
    checked_integer("world_size", world_size, 1)


def _require_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim != 2:
        raise ShapeError(f"{name} with two dimensions", str(tuple(tensor.shape)))


def _draw(num_tokens: int, topk: int, log_probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # Sorting Gumbel-perturbed log probabilities draws without replacement in the given proportions (Gumbel top-k).
    num_experts = log_probabilities.numel()
    uniform = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    keys = log_probabilities - torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))
    order = keys.argsort(dim=1, descending=True)
    return order[:, torch.arange(topk) % num_experts].to(torch.int32)


def _uniform(num_tokens: int, topk: int, num_experts: int, world_size: int, generator: torch.Generator) -> torch.Tensor:
    return _draw(num_tokens, topk, torch.zeros(num_experts, dtype=torch.float64), generator)


def _zipf(num_tokens: int, topk: int, num_experts: int, world_size: int, generator: torch.Generator) -> torch.Tensor:
    return _draw(num_tokens, topk, -torch.log(torch.arange(1, num_experts + 1, dtype=torch.float64)), generator)


def _all_to_one(
    num_tokens: int, topk: int, num_experts: int, world_size: int, generator: torch.Generator
) -> torch.Tensor:
    return _uniform(num_tokens, topk, num_owned_experts(num_experts, world_size, 0), 1, generator)


def _one_expert_per_rank(num_tokens: int, topk: int, num_experts: int, world_size: int, *_: object) -> torch.Tensor:
    ranges = torch.tensor(expert_ranges(num_experts, world_size))
    num_ranks = min(world_size, num_experts)
    slot = torch.arange(topk)
    rank = (torch.arange(num_tokens)[:, None] + slot) % num_ranks
    first, end = ranges[rank].unbind(-1)
    return (first + (slot // num_ranks) % (end - first)).to(torch.int32)


def _round_robin(num_tokens: int, topk: int, num_experts: int, *_: object) -> torch.Tensor:
    return (torch.arange(num_tokens * topk).reshape(num_tokens, topk) % num_experts).to(torch.int32)


def _all_dropped(num_tokens: int, topk: int, *_: object) -> torch.Tensor:
    return torch.full((num_tokens, topk), -1, dtype=torch.int32)


def _replace_slots(
    ids: torch.Tensor, num_slots: int, replacements: list[int], generator: torch.Generator
) -> torch.Tensor:
    slots = torch.randperm(ids.numel(), generator=generator)[:num_slots]
    values = torch.tensor(replacements, dtype=torch.int32)
    ids.view(-1)[slots] = values[torch.arange(num_slots) % len(replacements)]
    return ids


def _some_dropped(
    num_tokens: int, topk: int, num_experts: int, world_size: int, generator: torch.Generator
) -> torch.Tensor:
    ids = _uniform(num_tokens, topk, num_experts, world_size, generator)
    return _replace_slots(ids, ids.numel() // 3, [-1], generator)


def _out_of_range(
    num_tokens: int, topk: int, num_experts: int, world_size: int, generator: torch.Generator
) -> torch.Tensor:
    ids = _uniform(num_tokens, topk, num_experts, world_size, generator)
    junk = [num_experts, -(2**31), 2**31 - 1, -1, -num_experts, num_experts + world_size]
    return _replace_slots(ids, (ids.numel() + 1) // 2, junk, generator)


def _repeated(
    num_tokens: int, topk: int, num_experts: int, world_size: int, generator: torch.Generator
) -> torch.Tensor:
    return _uniform(num_tokens, 1, num_experts, world_size, generator).repeat(1, topk)


ROUTINGS: dict[str, RoutingCase] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "all_to_one": _all_to_one,
    "one_expert_per_rank": _one_expert_per_rank,
    "all_dropped": _all_dropped,
    "some_dropped": _some_dropped,
    "out_of_range": _out_of_range,
    "repeated": _repeated,
    "round_robin": _round_robin,
}
"""Routings by name, for num_experts >= 1. Where topk exceeds the experts to choose from, a token's ids repeat.

uniform: distinct experts, all alike. zipf: distinct experts, e with weight 1/(e+1), so that low ranks are busiest.
all_to_one: only rank 0's experts. one_expert_per_rank: slot k of token t goes to rank (t + k) % W, counting only ranks
with experts. all_dropped: all -1. some_dropped: uniform with a third of the slots -1. out_of_range: uniform with half
of the slots too large or negative, down to -2**31 and up to 2**31 - 1. repeated: one uniform id in all slots of a
token. round_robin: consecutive ids, token after token.
"""
