"""The launches that both engines between nodes make: row numbers, results offered to the node, their constants."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.config import FP8_GROUP_SIZE, WHOLE_RING_KERNEL_TYPES
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.constants import Line, NodeSums, Numbering, Ring, constants
from ep_a2a.kernels.layout import WORD_BYTES, count_bits, padded
from ep_a2a.kernels.ring_dispatch_kernels import number_rows_kernel
from ep_a2a.kernels.ring_offer_kernels import offer_results_kernel
from ep_a2a.kernels.ring_shape import BACK, TO_EXPERTS, Rings
from ep_a2a.log_once import log_once
from ep_a2a.ops.row_constants import MANY_TOKENS, row_constants, scale_constants
from ep_a2a.policy import INTERPRETED_PROGRAMS

if TYPE_CHECKING:
    from ep_a2a.ops.arguments import CombineArguments, Step
    from ep_a2a.ops.engine import Launched
    from ep_a2a.ops.op_kernels import OpKernels

RING_WARPS = 8
THREADS = 32 * RING_WARPS
CHANNEL_REGISTERS = 128
"""As many as leave room for two programs of a multiprocessor."""
OFFERING_PROGRAMS_PER_SM = 4
ADD_ELEMENTS = 4096
"""Elements of a row that a program adds at once."""
OFFER_ELEMENTS = 8192
"""Elements of a row that a program offers at once."""

logger = logging.getLogger(__name__)


def warn_of_warps(given: str) -> None:
    """Warn of a number of warps for kernels between nodes, whose number is fixed."""
    log_once(logger, logging.WARNING, f"without effect between nodes: {given}; those kernels have a fixed number")


class RingLaunches:
    """Makes launches for one op whose tokens cross nodes. A call's block_num, else with launch="manual" the config's,
    bounds the programs that exchange nothing.

    Args:
        kernels: of the op.

    Attributes:
        rings: shape of the rings. holds_a_step: whether a ring holds a whole step.
        to_experts, back: the rings of each direction, as kernels know them.
    """

    def __init__(self, kernels: OpKernels) -> None:
        config = kernels.config
        self.kernels, self.config = kernels, config
        self.rings = Rings.of(config)
        self.to_experts, self.back = (self._ring(direction) for direction in (TO_EXPERTS, BACK))
        self.holds_a_step = config.kernel_type in WHOLE_RING_KERNEL_TYPES
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

    def numbering(self, args: Step, block_num: int, *, finishes: bool) -> Launched:
        """The launch that numbers a rank's rows at every rank. finishes: whether it is the call's last launch."""
        kernels = self.kernels

        def make() -> CompiledKernel:
            numbering = {
                "MANY_TOKENS": max(MANY_TOKENS, THREADS),
                "POISON_LANES": THREADS,
                "FINISHES": finishes,
                "COUNT_BITS": count_bits(self.config.max_num_inp_token_per_rank),
            }
            given = {"OWNERS": kernels.placement, "S": kernels.shape, "N": constants(Numbering, numbering)}
            return CompiledKernel(number_rows_kernel, given, RING_WARPS)

        values = (args.ids, kernels.table, args.num_tokens, args.wire_word, self.config.rank)
        kernel = kernels.get(("number", finishes), make)
        return kernel, values, self.num_programs(args.num_tokens, block_num)

    def offering(self, args: CombineArguments, block_num: int) -> Launched:
        """The launch that copies results, or casts them, to where the ranks of this node can read them."""
        kernels, config = self.kernels, self.config

        def make() -> CompiledKernel:
            given = {
                "S": kernels.shape,
                "B": kernels.results.block(config.hidden_dim, OFFER_ELEMENTS, RING_WARPS),
                "HAS_WEIGHTS": args.weights is not None,
                "POISON_LANES": THREADS,
            }
            return CompiledKernel(offer_results_kernel, given, RING_WARPS)

        rows = kernels.result_rows(args.rows)
        words = kernels.absent if args.weights is None else args.weights.view(torch.int32)
        values = (rows, words, kernels.table, args.num_tokens, args.step_tokens, config.rank)
        most_rows = config.world_size * args.step_tokens
        num_programs = self.num_programs(most_rows, block_num, OFFERING_PROGRAMS_PER_SM)
        return kernels.get(("offer", args.weights is None), make), values, num_programs

    @property
    def wait_lanes(self) -> dict[str, int]:
        """Lanes of waits for counts and for the poison word, at least the threads of a program."""
        return {"COUNT_LANES": self.kernels.count_lanes(THREADS), "POISON_LANES": THREADS}

    def line_constants(self, args: Step) -> dict[str, Any]:
        """Of kernels that write or read the lines of tokens."""
        config, rings, casts = self.config, self.rings, self.kernels.casts(args.tokens)
        num_bytes = config.num_scales * config.scale_bytes if casts else self.kernels.scale_bytes(args.scales)
        # scales that the cast computes are stored one by one
        scales = scale_constants(num_bytes, by_bytes=casts and config.scale_bytes == 1)
        weights_at = rings.ids_at + config.topk
        rows_at = weights_at + config.topk
        line = scales | {
            "IDS_AT": rings.ids_at,
            "WEIGHTS_AT": weights_at,
            "ROWS_AT": rows_at,
            "TOKEN_AT": rows_at + rings.gpus_per_node,
            "HAS_WEIGHTS": args.weights is not None,
            "OWN_LINE_EACH": self.holds_a_step or rings.by_host,
        }
        return {
            "S": self.kernels.shape,
            "R": self.to_experts,
            "ROW": row_constants(config, casts=casts),
            "LINE": constants(Line, line),
        }

    def sum_constants(self, args: CombineArguments) -> dict[str, Any]:
        """Of kernels that add rows of results."""
        config, results = self.config, self.kernels.results
        sums = {
            "HIDDEN": config.hidden_dim,
            "BLOCK": min(padded(config.hidden_dim), ADD_ELEMENTS),
            "WEIGHTS_AT": config.hidden_dim * config.combined_dtype.itemsize // WORD_BYTES,
            "DTYPE": results.dtype,
            "ELEMENT": results.plain_element,
            "QUANTIZED": results.quantized,
            "SCALE_GROUP": FP8_GROUP_SIZE if results.scaled else 0,
            "HAS_WEIGHTS": args.weights is not None,
            "CHECK_INDICES": args.ids is not None,
            "POISON_LANES": THREADS,
        }
        return {"S": self.kernels.shape, "R": self.back, "A": constants(NodeSums, sums)}

    def _ring(self, direction: int) -> Ring:
        """The rings of a direction, as kernels know them."""
        rings, back = self.rings, direction == BACK
        values = {
            "DIRECTION": direction,
            "NODES": rings.num_nodes,
            "NODE_LANES": padded(rings.num_nodes),
            "GPUS": rings.gpus_per_node,
            "GPU_LANES": padded(rings.gpus_per_node),
            "CHANNELS": rings.num_channels,
            "SLOTS": rings.num_slots,
            "CHUNK_TOKENS": rings.chunk_tokens,
            "NUM_CHUNKS": rings.num_chunks,
            "LINE_WORDS": rings.back_line_words if back else rings.line_words,
            "SLOT_WORDS": rings.back_slot_words if back else rings.slot_words,
            "STAGED_WORDS": rings.staged_words,
            "HEAD_WORDS": rings.head_words,
        }
        return constants(Ring, values)
