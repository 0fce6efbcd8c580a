"""Shape of the chunks in which tokens travel between nodes, and of the rings that hold them: pure arithmetic.

A rank exchanges chunks with the ranks of its local number on all nodes, its own included, in two directions: tokens on
their way to experts, and results on their way back. The tokens of a rank are cut into chunks, which the channels share
in turn: channel c has chunks c, c + num_channels, ... Each channel has a ring of `num_slots` chunks per peer and
direction, at the receiving end.

Where the host moves the blocks between nodes (config.is_staged), there is one chunk per channel, too. A rank's chunks
of a step for a node lie behind one another, behind a head with counts, flags and failures for all ranks.
"""

import math
from dataclasses import dataclass

from ep_a2a.config import WHOLE_RING_KERNEL_TYPES, EpDispatchCombineConfig
from ep_a2a.errors import ConfigError
from ep_a2a.kernels.device_enum import DeviceEnum, DeviceNumber

BY_PUTS = "nvshmem"
"""The transport whose memory of other nodes is reached by puts."""
MAX_CHANNELS = 256
"""Nearly two programs for each multiprocessor of an H200: one works on one line at a time."""
TO_EXPERTS, BACK = DeviceNumber(0), DeviceNumber(1)
"""Directions of chunks."""


class ChunkWord(DeviceEnum):
    """Words before the lines of a chunk on its way to experts; the unused one keeps lines aligned.

    FIRST_ROW: where the rows of its source begin at every rank, but for layout compact.
    """

    NUM_LINES = 0
    IS_LAST = 1
    FIRST_ROW = 2


HEADER_WORDS = DeviceNumber(4)
"""Words before those lines."""


class HeadMark(DeviceEnum):
    """Words behind the counts of a head: epochs of the combine and of its weights, and the poison word."""

    COMBINE_EPOCH = 0
    WEIGHT_EPOCH = 1
    POISON = 2


WORD_BYTES = 4
ALIGNED_WORDS = 4


@dataclass(frozen=True)
class Rings:
    """Shape of an op's rings; equal on all ranks that agree on the config. Without rings everything is 0.

    Attributes:
        num_nodes, gpus_per_node: N and G.
        num_channels: channels, each with a ring per node and direction.
        chunk_tokens: tokens of a chunk. num_chunks: chunks of M tokens.
        num_slots: chunks that a ring holds, a power of two.
        row_words, scale_words: words of a row and of its scales.
        line_words: words of a line on the way to experts: row, scales, K ids, K weights, the row's number at each of
            the node's G ranks or -1, and the token's number at its source.
        back_line_words: words of a line on the way back: a row of results and K weights.
        by_puts: kernels reach memory of other nodes by puts only (transport nvshmem), not by stores.
        head_words: words before the chunks that go to a node: a line of counts, and HeadMark. 0 but with `by_host`.
    """

    num_nodes: int
    gpus_per_node: int
    num_channels: int
    chunk_tokens: int
    num_chunks: int
    num_slots: int
    row_words: int
    scale_words: int
    line_words: int
    back_line_words: int
    by_puts: bool = False
    head_words: int = 0

    @classmethod
    def of(cls, config: EpDispatchCombineConfig) -> "Rings":
        """The rings of a config.

        Raises:
            ConfigError: gpu_per_node does not divide the ranks, or ring_chunks is no power of two.
        """
        if not config.uses_rings:
            return cls(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        most, topk = config.max_num_inp_token_per_rank, config.topk
        per_node = min(config.gpu_per_node, config.world_size)
        if config.world_size % per_node:
            raise ConfigError(f"gpu_per_node to divide world_size {config.world_size}", str(config.gpu_per_node))
        if config.ring_chunks & (config.ring_chunks - 1):
            raise ConfigError("to be a power of two", str(config.ring_chunks), field="ring_chunks")
        asks = config.launch == "manual" and config.rdma_block_num > 0
        channels = config.rdma_block_num if asks else MAX_CHANNELS
        if config.is_staged or config.kernel_type in WHOLE_RING_KERNEL_TYPES:
            chunk_tokens, num_slots = math.ceil(most / min(channels, most)), 1
        else:
            chunk_tokens, num_slots = min(config.chunk_tokens, most), config.ring_chunks
        num_chunks = math.ceil(most / chunk_tokens)
        # a channel without a chunk of its own would have no place in the record of what was forwarded
        num_channels = min(channels, num_chunks)
        # a ring never holds more than its channel's chunks of one step
        num_slots = min(num_slots, 1 << (math.ceil(num_chunks / num_channels) - 1).bit_length())
        row_words = config.hidden_dim * config.wire_dtype.itemsize // WORD_BYTES
        scale_words = math.ceil(config.num_scales * config.scale_bytes / WORD_BYTES)
        back_words = config.hidden_dim * config.combined_dtype.itemsize // WORD_BYTES
        return cls(
            config.world_size // per_node, per_node, num_channels, chunk_tokens, num_chunks, num_slots,
            row_words, scale_words, _aligned(row_words + scale_words + 2 * topk + per_node + 1),
            _aligned(back_words + topk), config.internode_transport == BY_PUTS,
            _aligned(2 * (config.world_size + 2) + len(HeadMark)) if config.is_staged else 0,
        )  # fmt: skip

    @property
    def by_host(self) -> bool:
        """Whether the host moves the blocks that kernels have packed for other nodes (config.is_staged)."""
        return self.head_words > 0

    def chunks_of_step(self, step_tokens: int) -> int:
        """Chunks in which so many tokens of a rank lie."""
        return math.ceil(step_tokens / self.chunk_tokens)

    def node_words(self, step_tokens: int, *, back: bool) -> int:
        """Words that go to one node in such a step, where the host moves them."""
        slot_words = self.back_slot_words if back else self.slot_words
        return self.head_words + self.chunks_of_step(step_tokens) * slot_words

    @property
    def ids_at(self) -> int:
        """Words before the ids of a line on the way to experts. Its weights, row numbers and token's number follow."""
        return self.row_words + self.scale_words

    @property
    def slot_words(self) -> int:
        """Words of a chunk on the way to experts."""
        return HEADER_WORDS + self.chunk_tokens * self.line_words if self.num_nodes else 0

    @property
    def back_slot_words(self) -> int:
        """Words of a chunk on the way back."""
        return self.chunk_tokens * self.back_line_words

    @property
    def staged_words(self) -> int:
        """Words of a channel's memory for the chunk that it puts next, of either direction."""
        return max(self.slot_words, self.back_slot_words) if self.by_puts else 0


def _aligned(words: int) -> int:
    return -(-words // ALIGNED_WORDS) * ALIGNED_WORDS
