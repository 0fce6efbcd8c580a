"""Reads out of an op's memory where the rows of layout expert_major came from."""

import torch

from ep_a2a.errors import StateError
from ep_a2a.kernels.layout import Region
from ep_a2a.ops.arguments import Step
from ep_a2a.ops.op import EpDispatchCombineOp

NO_SOURCE = -1
HIGH_WORD_SHIFT = 32


def expert_row_sources(op: EpDispatchCombineOp, step: Step | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources of the rows of an op's last dispatch, in layout expert_major with step_tokens = M. No host waits.

    Args:
        op: that received the rows.
        step: the op's record of the dispatch that is asked about.

    Returns:
        (source_indices, counts_and_starts): int32 [E, W * M], the token that each row was on its source rank, and
        NO_SOURCE past an expert's rows; int64 [E, W], rows of the expert that came from each source in the lower 32
        bits and the first of them in the upper ones.

    Raises:
        StateError: the dispatch is over.
    """
    if step is None or op.open_step is not step:
        raise StateError(
            "the sources of rows to be read before combine",
            "a dispatch that is over",
            "Read them once between dispatch and combine; they stay then.",
        )
    config, view = op.config, op.memory.view
    world_size, num_experts = config.world_size, config.num_local_experts
    rows_per_source = config.max_num_inp_token_per_rank
    rows_per_expert = world_size * rows_per_source
    # one row behind the last takes slots of rows that have not come
    nowhere = num_experts * rows_per_expert

    received = torch.arange(rows_per_expert, dtype=torch.int64, device=op.device)
    sources = received // rows_per_source
    is_there = received % rows_per_source < op.recv_counts[sources]
    slots = view(Region.EXPERT_SLOTS).to(torch.int64)
    slots = torch.where(is_there[:, None] & (slots >= 0), slots, nowhere).flatten()
    tokens = view(Region.SOURCE_POSITIONS) % rows_per_expert

    def by_slot(values: torch.Tensor) -> torch.Tensor:
        placed = torch.full((nowhere + 1,), NO_SOURCE, dtype=torch.int32, device=op.device)
        placed.scatter_(0, slots, values.to(torch.int32).repeat_interleave(config.topk))
        return placed[:nowhere].view(num_experts, rows_per_expert)

    source_indices, source_ranks = by_slot(tokens), by_slot(sources)
    ranks = torch.arange(world_size, dtype=torch.int32, device=op.device)
    counts = (source_ranks[:, :, None] == ranks).sum(dim=1)
    starts = counts.cumsum(dim=1) - counts
    return source_indices, counts | starts << HIGH_WORD_SHIFT
