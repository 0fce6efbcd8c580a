"""InterNodeV1, InterNodeV1LL and AsyncLL: the launches of one op whose tokens cross nodes in rings of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from ep_a2a.config import FP8_GROUP_SIZE, WHOLE_RING_KERNEL_TYPES
from ep_a2a.kernels.compiled_kernel import CompiledKernel, linked_with_nvshmem
from ep_a2a.kernels.constants import Exchange, Line, Numbering, Ring, Row, Sums, constants
from ep_a2a.kernels.layout import WORD_BYTES, Region, Stage, count_bits, padded
from ep_a2a.kernels.put_kernels import quiet_kernel
from ep_a2a.kernels.remote_mirror_kernels import put_mirrors_kernel
from ep_a2a.kernels.ring_combine_kernels import return_kernel
from ep_a2a.kernels.ring_dispatch_kernels import exchange_kernel, number_rows_kernel
from ep_a2a.kernels.ring_offer_kernels import offer_results_kernel
from ep_a2a.kernels.ring_shape import BACK, TO_EXPERTS, Rings
from ep_a2a.ops.arguments import RECEIVE, SEND, CombineArguments, DispatchArguments, Stages
from ep_a2a.ops.ignored_options import warn_of_warps
from ep_a2a.ops.intra_node import IntraNodeKernels
from ep_a2a.ops.row_constants import MANY_TOKENS, MAX_BLOCK_WORDS, row_constants
from ep_a2a.ops.warmup_args import warmup_combines, warmup_dispatches
from ep_a2a.tuning.policy import DISPATCH_WARPS, INTERPRETED_PROGRAMS, Launch, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.launch_plan import Launches
    from ep_a2a.ops.op import EpDispatchCombineOp

RING_WARPS = 8
THREADS = 32 * RING_WARPS
OFFERING_PROGRAMS_PER_SM = 4
CHANNEL_PROGRAMS_PER_SM = 2
"""Programs that take turns with the channels; each has one line in flight."""
CHANNEL_REGISTERS = 128
"""As many as leave room for those programs."""
RECEIVING = Launch(1, DISPATCH_WARPS, "one program receives")
ADD_ELEMENTS = 4096
"""Elements of a row that a program adds at once."""
OFFER_ELEMENTS = 8192
"""Elements of a row that a program offers at once."""


class InterNodeKernels(IntraNodeKernels):
    """Compiles and launches the kernels of rings for one config; every rank's memory must be addressable by all.

    A dispatch is three launches: row numbers, the exchange of chunks, and the receiving stage of IntraNode. A combine
    is two: results are offered to the node, and the exchange of sums. In split calls, an op whose rings hold a whole
    step sends its chunks in the first half; else only row numbers and results travel in the first half. A call's
    block_num, else with launch="manual" the config's, bounds the programs that exchange nothing.
    """

    def __init__(self, config: EpDispatchCombineConfig, table: torch.Tensor, device: torch.device) -> None:
        super().__init__(config, table, device)
        self._rings = Rings.of(config)
        self._to_experts, self._back = (self._ring(direction) for direction in (TO_EXPERTS, BACK))
        self._linked: dict[str, Any] = {}
        if self._rings.by_puts and not self._interpreted:
            self._linked = linked_with_nvshmem(device)
        if config.launch == "manual" and config.warp_num_per_block != RING_WARPS:
            warn_of_warps(f"warp_num_per_block={config.warp_num_per_block}")
        self._holds_a_step = config.kernel_type in WHOLE_RING_KERNEL_TYPES
        self.sends_late = not self._holds_a_step

    @property
    def num_channel_programs(self) -> int:
        """Programs that take turns with the channels: by what ranks agree on, never by what a call asks for.

        A program goes on to its next channel when the one before is done. Ranks that went through them in different
        orders could wait for each other, where not all programs run at once; in the interpreter none do.
        """
        return min(self._rings.num_channels, self._most_programs(CHANNEL_PROGRAMS_PER_SM) or 1)

    def _most_programs(self, per_sm: int) -> int:
        """Programs that run at once; where multiprocessors are bounded one for each, since more would take others."""
        usable_sms = min(self.num_sms, self.max_sms or self.num_sms)
        return usable_sms * (1 if usable_sms < self.num_sms else per_sm)

    def _dispatch_launches(
        self, args: DispatchArguments, stages: Stages, block_num: int, warp_per_block: int
    ) -> Launches:
        if stages.send:
            finishes = stages == SEND and not self._holds_a_step
            values = (args.ids, self.table, args.num_tokens, args.wire_word, self.config.rank)
            yield self._number_variant(finishes), values, self._num_programs(args.num_tokens, block_num)
            yield from self._put_mirrors(counts=True)
        sends, forwards = stages.send, stages.receive
        if not self._holds_a_step:
            sends = forwards = stages.receive
        if sends or forwards:
            variant = self._exchange_variant(args, stages, sends=sends, forwards=forwards)
            yield variant, self._exchange_values(args), self.num_channel_programs
        if stages.receive:
            yield self._receiving(args)
        yield from self._put_mirrors()

    def _receiving(self, args: DispatchArguments) -> tuple[CompiledKernel, tuple[Any, ...], int]:
        """The receiving stage of IntraNode. What the rows are is nothing to it, and one variant serves all."""
        plain = args._replace(x=args.ids, scales=None, weights=None)
        variant = self._dispatch_variant(plain._replace(max_num_tokens=1), Phase.DISPATCH, RECEIVING, RECEIVE)
        return variant, self._dispatch_values(plain, Phase.DISPATCH, RECEIVING), 1

    def quiet(self) -> None:
        """Launches what ends when all that was put has come to other nodes."""
        if self._rings.by_puts and not self._interpreted:
            key = ("quiet",)
            if key not in self._variants:
                self._variants[key] = CompiledKernel(quiet_kernel, {}, 1, **self._linked)
            self._variants[key].run(1, (self.table,), self.device)

    def _put_mirrors(self, *, counts: bool = False, flags: bool = False, weights: bool = False) -> Launches:
        """Puts failures, and the named kinds of words, to ranks that kernels cannot store to (put_mirrors_kernel)."""
        if not self._rings.by_puts:
            return
        key = "put mirrors", counts, flags, weights
        if key not in self._variants:
            given = {
                "GPUS": self._rings.gpus_per_node,
                "WORLD_SIZE": self.config.world_size,
                "TELLS_COUNTS": counts,
                "TELLS_FLAGS": flags,
                "HAS_WEIGHTS": weights,
            }
            self._variants[key] = CompiledKernel(put_mirrors_kernel, given, 1, **self._linked)
        num_remote = self.config.world_size - self._rings.gpus_per_node
        if num_remote:
            yield self._variants[key], (self.table, self.config.rank), num_remote

    def full_sized_launch(self, is_dispatch: bool, block_num: int, warp_per_block: int) -> tuple[int, int, int]:
        """(programs that exchange nothing, those of channels, warps per program) of a call with as many tokens as there
        may be."""
        tokens = self.config.max_num_inp_token_per_rank
        num_programs = self._num_programs(tokens, block_num)
        if not is_dispatch:
            num_programs = self._num_programs(self.config.world_size * tokens, block_num, OFFERING_PROGRAMS_PER_SM)
        return num_programs, self.num_channel_programs, RING_WARPS

    def _num_programs(self, num_rows: int, block_num: int, per_sm: int = 1) -> int:
        if block_num <= 0 and self.config.launch == "manual":
            block_num = self.config.block_num
        most = self._most_programs(per_sm) or INTERPRETED_PROGRAMS
        return max(1, min(num_rows, most, block_num if block_num > 0 else most))

    def _combine_launches(
        self, args: CombineArguments, stages: Stages, block_num: int, warp_per_block: int
    ) -> Launches:
        config = self.config
        if stages.send:
            yield self._offering(args, block_num)
            yield from self._put_mirrors(flags=True, weights=args.weights is not None)
        if stages.receive:
            ids = self.table if args.ids is None else args.ids
            values = (args.result, ids, *args.biases, self.table, args.num_tokens, config.rank)
            yield self._return_variant(args), values, self.num_channel_programs
            yield from self._put_mirrors()

    def _offering(self, args: CombineArguments, block_num: int) -> tuple[CompiledKernel, tuple[Any, ...], int]:
        rows, config = self._result_rows(args.rows), self.config
        words = self.table if args.weights is None else args.weights.view(torch.int32)
        values = (rows, words, self.table, args.num_tokens, args.max_num_tokens, config.rank)
        most_rows = config.world_size * args.max_num_tokens
        num_programs = self._num_programs(most_rows, block_num, OFFERING_PROGRAMS_PER_SM)
        return self._offer_variant(args), values, num_programs

    def _reachable(self, stages: Stages) -> Iterator[tuple[CompiledKernel, tuple[Any, ...]]]:
        for dispatch in warmup_dispatches(self.config, self.device):
            for variant, values, _ in self._dispatch_launches(dispatch, stages, -1, -1):
                yield variant, values
        for combine in warmup_combines(self.config, self.device):
            for variant, values, _ in self._combine_launches(combine, stages, -1, -1):
                yield variant, values

    def _number_variant(self, finishes: bool) -> CompiledKernel:
        key = "number", finishes
        if key not in self._variants:
            numbering = {
                "MANY_TOKENS": max(MANY_TOKENS, THREADS),
                "POISON_LANES": THREADS,
                "FINISHES": finishes,
                "COUNT_BITS": count_bits(self.config.max_num_inp_token_per_rank),
            }
            given = {"OWNERS": self._placement, "S": self._op_shape, "N": constants(Numbering, numbering)}
            self._variants[key] = CompiledKernel(number_rows_kernel, given, RING_WARPS)
        return self._variants[key]

    def _exchange_variant(
        self, args: DispatchArguments, stages: Stages, *, sends: bool, forwards: bool
    ) -> CompiledKernel:
        key = "exchange", args.x.dtype, args.scales is None, args.weights is None, stages
        if key not in self._variants:
            exchange = {
                "SENDS": sends,
                "FORWARDS": forwards,
                "FINISHES": stages.send,
                **self._wait_lanes,
                "STAGE": int(Stage.DISPATCH_SEND if stages.send else Stage.DISPATCH_RECEIVE),
            }
            given = self._line_constants(args) | {"X": constants(Exchange, exchange)}
            self._variants[key] = CompiledKernel(exchange_kernel, given, RING_WARPS, CHANNEL_REGISTERS, **self._linked)
        return self._variants[key]

    def _exchange_values(self, args: DispatchArguments) -> tuple[Any, ...]:
        config = self.config
        x, scales, weights, ids, table = self._dispatch_tensors(args, self._scale_bytes(args.scales))
        return (
            x,
            scales,
            weights,
            ids,
            table,
            args.num_tokens,
            args.max_num_tokens,
            args.row_limit,
            config.world_size * config.max_num_inp_token_per_rank,
            config.rank,
        )

    @property
    def _wait_lanes(self) -> dict[str, int]:
        """Lanes of waits for counts and for the poison word, at least the threads of a program."""
        count_words = self.config.world_size * (self.config.world_size + 1)
        return {"COUNT_LANES": max(padded(count_words), THREADS), "POISON_LANES": THREADS}

    def _line_constants(self, args: DispatchArguments) -> dict[str, Any]:
        """Of kernels that write or read the lines of tokens."""
        config, rings, casts = self.config, self._rings, self._casts(args.x)
        row = row_constants(config, casts=casts)
        num_bytes = config.num_scales * config.scale_bytes if casts else self._scale_bytes(args.scales)
        # scales that are made here are stored one by one
        in_words = config.scale_bytes == WORD_BYTES if casts else num_bytes % WORD_BYTES == 0
        width = num_bytes // WORD_BYTES if in_words else num_bytes
        weights_at = rings.ids_at + config.topk
        rows_at = weights_at + config.topk
        line = {
            "SCALE_WIDTH": width,
            "SCALE_LANES": padded(max(1, width)),
            "SCALE_DTYPE": tl.int32 if in_words else tl.uint8,
            "IDS_AT": rings.ids_at,
            "WEIGHTS_AT": weights_at,
            "ROWS_AT": rows_at,
            "TOKEN_AT": rows_at + rings.gpus_per_node,
            "HAS_WEIGHTS": args.weights is not None,
            "OWN_LINE_EACH": self._holds_a_step or rings.by_host,
        }
        block_words = min(padded(row["ROW_WORDS"]), MAX_BLOCK_WORDS)
        return {
            "S": self._op_shape,
            "R": self._to_experts,
            "ROW": constants(Row, row | {"BLOCK_WORDS": block_words}),
            "LINE": constants(Line, line),
        }

    def _offer_variant(self, args: CombineArguments) -> CompiledKernel:
        key = "offer", args.weights is None
        if key not in self._variants:
            given = {
                "S": self._op_shape,
                "B": self._results.block(self.config.hidden_dim, OFFER_ELEMENTS, RING_WARPS),
                "HAS_WEIGHTS": args.weights is not None,
                "POISON_LANES": THREADS,
            }
            self._variants[key] = CompiledKernel(offer_results_kernel, given, RING_WARPS)
        return self._variants[key]

    def _return_variant(self, args: CombineArguments) -> CompiledKernel:
        key = "return", args.weights is None, args.ids is None, *(bias is None for bias in args.biases)
        if key not in self._variants:
            given = self._sum_constants(args)
            self._variants[key] = CompiledKernel(return_kernel, given, RING_WARPS, CHANNEL_REGISTERS, **self._linked)
        return self._variants[key]

    def _sum_constants(self, args: CombineArguments) -> dict[str, Any]:
        """Of kernels that add rows of results."""
        config, results = self.config, self._results
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
        return {"S": self._op_shape, "R": self._back, "A": constants(Sums, sums)}

    def _ring(self, direction: int) -> Ring:
        """The rings of a direction, as kernels know them."""
        rings, back = self._rings, direction == BACK
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


def rows_from_other_nodes(op: EpDispatchCombineOp, num_tokens: int) -> int:
    """Tokens that came to this rank from other nodes in the last step, through its rings, to be forwarded.

    Args:
        op: one whose kernels use rings, with its last kernel awaited.
        num_tokens: the most that any rank brought. No rank may have brought more of its own in an earlier step.
    """
    rings = Rings.of(op.config)
    num_chunks = -(-num_tokens // rings.chunk_tokens)
    rows = op.memory.view(Region.FORWARDED_ROWS).view(rings.num_nodes, -1, rings.chunk_tokens, rings.gpus_per_node)
    lines = op.memory.view(Region.FORWARDED_LINES)[:, :num_chunks]
    is_line = torch.arange(rings.chunk_tokens, device=lines.device) < lines[:, :, None]
    came = (rows[:, :num_chunks] >= 0).any(3) & is_line
    came[op.config.rank // rings.gpus_per_node] = False
    return int(came.sum())
