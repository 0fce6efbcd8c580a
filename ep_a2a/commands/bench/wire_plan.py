"""Plans the pushes of the wire's limit: which bytes go to which rank, and the pattern that they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

VECTOR_BYTES = 16
PATTERN_FACTOR, PATTERN_STEP = 2_654_435_761 - (1 << 32), 97_003


@dataclass(frozen=True)
class Peer:
    """The part of one launch for one other rank.

    Attributes:
        first_vector, num_vectors: the part of this rank's source that is sent there, in vectors of 16 bytes.
        target: address that it is written to.
        flag_there: address of this rank's flag at the peer. flag_here: of the peer's flag at this rank.
    """

    first_vector: int
    num_vectors: int
    target: int
    flag_there: int
    flag_here: int


def transfers(vectors: torch.Tensor, rank: int) -> list[tuple[int, int, int]]:
    """Returns, by rank after `rank`, (first vector in its source, number of vectors, first vector at the peer)."""
    world_size = vectors.shape[0]
    plan = []
    first = 0
    for peer in ((rank + 1 + step) % world_size for step in range(world_size - 1)):
        count = int(vectors[rank, peer])
        plan.append((first, count, int(vectors[:rank, peer].sum())))
        first += count
    return plan


def pattern(rank: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Returns `count` vectors of a rank's source from vector `first` on: int32 words that differ by rank and place."""
    num_words = VECTOR_BYTES // 4
    words = torch.arange(first * num_words, (first + count) * num_words, dtype=torch.int32, device=device)
    return words.mul_(PATTERN_FACTOR).add_(rank * PATTERN_STEP + 1)
