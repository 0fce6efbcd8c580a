"""What both engines between nodes share: row numbers, results offered to the node, constants of lines and sums."""

import logging
from typing import Any

import torch

from ep_a2a.config import FP8_GROUP_SIZE, WHOLE_RING_KERNEL_TYPES, EpDispatchCombineConfig
from ep_a2a.kernels.constants import Line, NodeSums, Ring
from ep_a2a.kernels.layout import WORD_BYTES, padded
from ep_a2a.kernels.ring_dispatch_kernels import number_rows_kernel
from ep_a2a.kernels.ring_offer_kernels import offer_results_kernel
from ep_a2a.kernels.ring_shape import BACK, TO_EXPERTS, Rings
from ep_a2a.log_once import log_once
from ep_a2a.ops.engine import Engine
from ep_a2a.ops.launches import CombineForm, DispatchForm, KernelLaunch, numbering_operands, offering_operands
from ep_a2a.ops.op_kernels import OpKernels
from ep_a2a.ops.row_constants import counted_tokens, row_constants, scale_constants
from ep_a2a.policy import INTERPRETED_PROGRAMS

RING_WARPS = 8
"""Warps of a program. µs of a round trip of 4096 tokens, on two H200s that stand for two nodes, 23 November; * marks
what was chosen:

    exchanging programs per multiprocessor   1          2          2*         3          4
    warps of each                            8          4          8*         4          4
    most registers                         255        255        128*       none       none
    offering programs per multiprocessor     1          4          4*         4          4
    InterNodeV1, InterNodeV1LL        616, 617   492, 517   480, 507   540, 515   538, 518
"""
THREADS = 32 * RING_WARPS
NUMBERED_TOKENS = 8
"""Tokens whose rows a program numbers at once. Other numbers were not timed."""
CHANNEL_REGISTERS = 128
"""Registers of a thread: as many as leave room for two programs on a multiprocessor (RING_WARPS has figures)."""
OFFERING_PROGRAMS_PER_SM = 4
"""Programs that offer results. Four were timed together with more that exchange (RING_WARPS), not by themselves."""
ADD_ELEMENTS = 4096
"""Elements of a row that a program adds at once, 16 for each of its threads. Other numbers were not timed."""
OFFER_ELEMENTS = 8192
"""Elements of a row that a program offers at once: a row of 7168 in one piece. Other numbers were not timed."""

logger = logging.getLogger(__name__)


def warn_of_warps(given: str) -> None:
    """Warn of a number of warps for kernels between nodes, whose number is fixed."""
    log_once(logger, logging.WARNING, f"without effect between nodes: {given}; those kernels have a fixed number")


class NodesEngine(Engine):
    """An engine whose tokens cross nodes. A call's block_num, else with launch="manual" the config's, bounds the
    programs that exchange nothing.

    Args:
        config: the op's.
        table: address table on the device, int64 [regions, W].
        device: where the kernels run; CPU means Triton's interpreter.

    Attributes:
        rings: shape of the rings. holds_a_step: whether a ring holds a whole step.
        to_experts, back: the rings of each direction, as kernels know them.
        wait_lanes: lanes of waits for counts and for the poison word, at least the threads of a program.
    """

    def __init__(self, config: EpDispatchCombineConfig, table: torch.Tensor, device: torch.device) -> None:
        self.kernels, self.config = OpKernels(config, table, device), config
        self.rings = Rings.of(config)
        self.to_experts, self.back = (_ring(self.rings, direction) for direction in (TO_EXPERTS, BACK))
        self.holds_a_step = config.kernel_type in WHOLE_RING_KERNEL_TYPES
        self.wait_lanes = {"COUNT_LANES": self.kernels.count_lanes(THREADS), "POISON_LANES": THREADS}
        if config.launch == "manual" and config.warp_num_per_block != RING_WARPS:
            warn_of_warps(f"warp_num_per_block={config.warp_num_per_block}")

    def most_programs(self, per_sm: int) -> int:
        """Programs that run at once; where multiprocessors are bounded one for each, since more would take others."""
        num_sms = self.kernels.num_sms
        usable_sms = min(num_sms, self.kernels.max_sms or num_sms)
        return usable_sms * (1 if usable_sms < num_sms else per_sm)

    def num_programs(self, num_rows: int, block_num: int, per_sm: int = 1) -> int:
        """Programs of a launch that shares so many rows, or chunks."""
        if block_num <= 0 and self.config.launch == "manual":
            block_num = self.config.block_num
        most = self.most_programs(per_sm) or INTERPRETED_PROGRAMS
        return max(1, min(num_rows, most, block_num if block_num > 0 else most))

    def offering_programs(self, step_tokens: int, block_num: int) -> int:
        """Programs of the launch that offers results."""
        return self.num_programs(self.config.world_size * step_tokens, block_num, OFFERING_PROGRAMS_PER_SM)

    def numbering(self, form: DispatchForm, block_num: int, *, finishes: bool) -> KernelLaunch:
        """The launch that numbers a rank's rows at every rank. finishes: whether it is the call's last launch."""
        return self.kernels.launch(
            number_rows_kernel,
            numbering_operands,
            form.read_as(self.config),
            {
                "OWNERS": self.kernels.placement,
                "S": self.kernels.shape,
                "MANY_TOKENS": counted_tokens(self.config.world_size, THREADS),
                "TOKENS": NUMBERED_TOKENS,
                "POISON_LANES": THREADS,
                "FINISHES": finishes,
            },
            RING_WARPS,
            numbers=(form.bounds.first_row, self.config.rank),
            num_programs=self.num_programs(form.num_tokens, block_num),
        )

    def offering(self, form: CombineForm, block_num: int) -> KernelLaunch:
        """The launch that copies results, or casts them, to where the ranks of this node can read them."""
        kernels, config = self.kernels, self.config
        return kernels.launch(
            offer_results_kernel,
            offering_operands,
            form.read_as(config),
            {
                "S": kernels.shape,
                "B": kernels.results.block(config.hidden_dim, OFFER_ELEMENTS, RING_WARPS),
                "HAS_WEIGHTS": form.has_weights,
                "POISON_LANES": THREADS,
            },
            RING_WARPS,
            numbers=(form.num_tokens, form.bounds.step_tokens, config.rank),
            num_programs=self.offering_programs(form.bounds.most, block_num),
        )

    def line_constants(self, form: DispatchForm) -> dict[str, Any]:
        """Of kernels that write or read the lines of tokens."""
        config, rings, casts = self.config, self.rings, form.casts(self.config)
        num_bytes = config.num_scales * config.scale_bytes if casts else form.scale_bytes(config)
        weights_at = rings.ids_at + config.topk
        rows_at = weights_at + config.topk
        line = Line(
            # scales that the cast computes are stored one by one
            *scale_constants(num_bytes, by_bytes=casts and config.scale_bytes == 1),
            IDS_AT=rings.ids_at,
            WEIGHTS_AT=weights_at,
            ROWS_AT=rows_at,
            TOKEN_AT=rows_at + rings.gpus_per_node,
            HAS_WEIGHTS=form.has_weights,
            OWN_LINE_EACH=self.holds_a_step or rings.by_host,
        )
        return {"S": self.kernels.shape, "R": self.to_experts, "ROW": row_constants(config, casts=casts), "LINE": line}

    def sum_constants(self, form: CombineForm) -> dict[str, Any]:
        """Of kernels that add rows of results."""
        config, results = self.config, self.kernels.results
        sums = NodeSums(
            HIDDEN=config.hidden_dim,
            BLOCK=min(padded(config.hidden_dim), ADD_ELEMENTS),
            WEIGHTS_AT=config.hidden_dim * config.combined_dtype.itemsize // WORD_BYTES,
            DTYPE=results.dtype,
            ELEMENT=results.plain_element,
            QUANTIZED=results.quantized,
            SCALE_GROUP=FP8_GROUP_SIZE if results.scaled else 0,
            HAS_WEIGHTS=form.has_weights,
            CHECK_INDICES=form.has_ids,
            POISON_LANES=THREADS,
        )
        return {"S": self.kernels.shape, "R": self.back, "A": sums}


def _ring(rings: Rings, direction: int) -> Ring:
    """The rings of a direction, as kernels know them."""
    back = direction == BACK
    return Ring(
        DIRECTION=direction,
        NODES=rings.num_nodes,
        NODE_LANES=padded(rings.num_nodes),
        GPUS=rings.gpus_per_node,
        GPU_LANES=padded(rings.gpus_per_node),
        CHANNELS=rings.num_channels,
        SLOTS=rings.num_slots,
        CHUNK_TOKENS=rings.chunk_tokens,
        NUM_CHUNKS=rings.num_chunks,
        LINE_WORDS=rings.back_line_words if back else rings.line_words,
        SLOT_WORDS=rings.back_slot_words if back else rings.slot_words,
        STAGED_WORDS=rings.staged_words,
        HEAD_WORDS=rings.head_words,
    )
