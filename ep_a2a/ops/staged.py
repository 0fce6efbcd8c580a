"""InterNodeV1 and its kin over torch.distributed: launches around the exchanges between nodes that the host makes."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import RankTimeoutError
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.layout import Region, Stage
from ep_a2a.kernels.primitives import NOBODY, TIMEOUT
from ep_a2a.kernels.staged_kernels import (
    forward_kernel,
    pack_kernel,
    pack_sums_kernel,
    pass_on_kernel,
    post_failure_kernel,
    sum_nodes_kernel,
)
from ep_a2a.memory.liveness import GivenUp
from ep_a2a.ops.agreement import with_verdict
from ep_a2a.ops.arguments import WHOLE
from ep_a2a.ops.failures import COMBINE_PHASE, DISPATCH_PHASE, Failure, bound_of
from ep_a2a.ops.rings import CHANNEL_REGISTERS, RING_WARPS, THREADS, InterNodeKernels
from ep_a2a.ops.warmup_args import warmup_combines, warmup_dispatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.node_memory import NodeArena
    from ep_a2a.memory.node_transport import Exchange
    from ep_a2a.ops.arguments import CombineArguments, DispatchArguments, Stages
    from ep_a2a.ops.launch_plan import Launches
    from ep_a2a.ops.memory import BoundMemory

PROGRAMS_PER_SM = 2
"""Programs that share the chunks; each has one line in flight."""


class StagedKernels(InterNodeKernels):
    """Compiles and launches the kernels of one op whose tokens the host moves between nodes.

    A dispatch packs lines for all nodes, the host exchanges them, and what has come is copied to the ranks of this
    node. A combine offers results to the node, packs the node's sums, the host exchanges them, and the token's own rank
    adds the nodes. Every exchange has the lines of max_num_tokens tokens for each node, whatever the routing: sizes are
    known on the host, and a graph can hold it.

    A split dispatch begins its exchange in dispatch_send and ends it in dispatch_recv, so the exchange overlaps what is
    launched in between; but not while a graph is captured. A split combine exchanges in combine_recv.

    Args:
        config: the op's. memory: bound to it.
        arena: of this node, with what moves blocks between nodes.
    """

    def __init__(self, config: EpDispatchCombineConfig, memory: BoundMemory, arena: NodeArena) -> None:
        super().__init__(config, memory.table, arena.device)
        self._memory, self._rendezvous = memory, arena.rendezvous
        self._between = arena.between_nodes
        self._waiting = contextlib.nullcontext if arena.liveness is None else arena.liveness.waiting
        self._running: Exchange | None = None
        self._is_connected = self._interpreted
        self.sends_late = False

    def dispatch(
        self, args: DispatchArguments, block_num: int = -1, warp_per_block: int = -1, stages: Stages = WHOLE
    ) -> None:
        """Launches one dispatch, or one of its halves, and makes its exchange."""
        with self._naming_who_is_gone():
            super().dispatch(args, block_num, warp_per_block, stages)

    def combine(
        self, args: CombineArguments, block_num: int = -1, warp_per_block: int = -1, stages: Stages = WHOLE
    ) -> None:
        """Launches one combine, or one of its halves, and makes its exchange."""
        with self._naming_who_is_gone():
            super().combine(args, block_num, warp_per_block, stages)

    @contextlib.contextmanager
    def _naming_who_is_gone(self) -> Iterator[None]:
        """Within, a failed exchange raises the survivors' verdict: whom its transport misses is a hint only."""
        began = time.monotonic()
        try:
            yield
        except RankTimeoutError as error:
            failure = Failure.from_record(self._memory.synchronized_record(), self.config.world_size)
            bound_secs = bound_of(self._memory.timeouts, failure.epoch)
            left_secs = max(0.0, bound_secs - (time.monotonic() - began))
            own = GivenUp(error.missing_ranks, began=True)
            raise with_verdict(error, self._memory.agreement.verdict(own, bound_secs, left_secs)) from error

    def _dispatch_launches(
        self, args: DispatchArguments, stages: Stages, block_num: int, warp_per_block: int
    ) -> Launches:
        """Launches in order; what stands between two of them here happens between them."""
        if stages.send:
            self._between.require_open()
            yield from self._packing(args, block_num)
            self._running = self._begin(args.max_num_tokens, back=False)
        if stages.receive:
            self._end()
            yield from self._forwarding(args, block_num)

    def _combine_launches(
        self, args: CombineArguments, stages: Stages, block_num: int, warp_per_block: int
    ) -> Launches:
        if stages.send:
            yield self._offering(args, block_num)
        if stages.receive:
            self._between.require_open()
            yield from self._packing_sums(args, block_num)
            self._running = self._begin(args.max_num_tokens, back=True)
            self._end(back=True)
            yield from self._adding(args, block_num)

    def _begin(self, max_num_tokens: int, *, back: bool) -> Exchange:
        num_words = self._rings.node_words(max_num_tokens, back=back)
        regions = (Region.CHUNKS_BACK, Region.CHUNKS_SENT_BACK) if back else (Region.CHUNKS, Region.STAGED_CHUNKS)
        received, sent = (self._memory.view(region, (self._rings.num_nodes, num_words)) for region in regions)
        return self._between.begin(received, sent, self._bound_secs(back=back))

    def _end(self, *, back: bool = False) -> None:
        """Ends the running exchange; poisons the ranks of this node if it fails."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            with self._waiting():
                self._between.end(running, self._bound_secs(back=back))
        except RankTimeoutError as error:
            accused = error.missing_ranks[0] if len(error.missing_ranks) == 1 else NOBODY.value
            phase = COMBINE_PHASE if back else DISPATCH_PHASE
            values = (self.table, TIMEOUT.value << 16 | accused, phase, self.config.rank)
            self._failure_variant().run(1, values, self.device)
            raise

    def _bound_secs(self, *, back: bool) -> float:
        """Of an exchange on CPU. In combine ranks come to it that have waited for others of their node, so it is twice.

        Ranks of a node in which one is missing are the first to name it.
        """
        ended = int(self._memory.steps[Stage.COMBINE_RECEIVE]) if self._interpreted else 0
        return self._memory.timeouts.of_step(is_first=ended == 0) * (2 if back else 1)

    def quiet(self) -> None:
        """Connects anew where an exchange has failed, or not ended, on any rank. Collective."""
        is_well = self._between.is_open and self._running is None
        self._running = None
        if not all(self._rendezvous.exchange("exchanges between nodes", is_well)):
            self._between.renew()
            self._is_connected = self._interpreted
            self._connect()

    def compile(self) -> None:
        """Compiles all launches of whole calls; the first time this is collective on GPUs, where it connects nodes."""
        super().compile()
        self._connect()

    def _connect(self) -> None:
        if not self._is_connected:
            # an exchange that connects could not be captured
            self._is_connected = True
            self._between.exchange(
                self._memory.view(Region.CHUNKS, (self._rings.num_nodes, self._rings.head_words)),
                self._memory.view(Region.STAGED_CHUNKS, (self._rings.num_nodes, self._rings.head_words)),
            )

    def _packing(self, args: DispatchArguments, block_num: int) -> Launches:
        numbering = (args.ids, self.table, args.num_tokens, args.wire_word, self.config.rank)
        yield self._number_variant(finishes=False), numbering, self._num_programs(args.num_tokens, block_num)
        key = "pack", args.x.dtype, args.scales is None, args.weights is None
        given = self._line_constants(args) | {"POISON_LANES": THREADS}
        x, scales, weights, ids, table = self._dispatch_tensors(args, self._scale_bytes(args.scales))
        num_chunks = self._rings.chunks_of_step(args.max_num_tokens)
        values = (x, scales, weights, ids, table, args.num_tokens, num_chunks, self.config.rank)
        yield self._variant(key, pack_kernel, given), values, self._programs(args.max_num_tokens, block_num)

    def _forwarding(self, args: DispatchArguments, block_num: int) -> Launches:
        config, rings = self.config, self._rings
        yield from self._passing_on(args.max_num_tokens, back=False, has_weights=False)
        key = "forward", args.x.dtype, args.scales is None, args.weights is None
        values = (
            self.table,
            rings.chunks_of_step(args.max_num_tokens),
            args.max_num_tokens,
            args.row_limit,
            config.world_size * config.max_num_inp_token_per_rank,
            config.rank,
        )
        # left alone, ptxas aims at fewer registers and puts words on the stack
        variant = self._variant(key, forward_kernel, self._line_constants(args) | self._wait_lanes, CHANNEL_REGISTERS)
        yield variant, values, self._programs(args.max_num_tokens, block_num)
        yield self._receiving(args)

    def _packing_sums(self, args: CombineArguments, block_num: int) -> Launches:
        # ids are compared where nodes are added
        given = self._sum_constants(args._replace(ids=None))
        variant = self._variant(("pack sums", args.weights is None), pack_sums_kernel, given)
        values = (self.table, self._rings.chunks_of_step(args.max_num_tokens), self.config.rank)
        yield variant, values, self._programs(args.max_num_tokens, block_num)

    def _adding(self, args: CombineArguments, block_num: int) -> Launches:
        yield from self._passing_on(args.max_num_tokens, back=True, has_weights=args.weights is not None)
        key = "sum nodes", args.weights is None, args.ids is None, *(bias is None for bias in args.biases)
        values = (
            args.result,
            self.table if args.ids is None else args.ids,
            *args.biases,
            self.table,
            args.num_tokens,
            self._rings.chunks_of_step(args.max_num_tokens),
            self.config.rank,
        )
        num_programs = self._programs(args.max_num_tokens, block_num, num_nodes=1)
        yield self._variant(key, sum_nodes_kernel, self._sum_constants(args)), values, num_programs

    def _passing_on(self, max_num_tokens: int, *, back: bool, has_weights: bool) -> Launches:
        if self._rings.num_nodes == 1:
            return
        given = {"S": self._op_shape, "R": self._back if back else self._to_experts, "HAS_WEIGHTS": has_weights}
        variant = self._variant(("pass on", back, has_weights), pass_on_kernel, given)
        values = (self.table, self._rings.chunks_of_step(max_num_tokens), self.config.rank)
        yield variant, values, self._rings.num_nodes - 1

    def _reachable(self, stages: Stages) -> Iterator[tuple[CompiledKernel, tuple[Any, ...]]]:
        for dispatch in warmup_dispatches(self.config, self.device):
            for variant, values, _ in (*self._packing(dispatch, -1), *self._forwarding(dispatch, -1)):
                yield variant, values
        for combine in warmup_combines(self.config, self.device):
            sums = (*self._packing_sums(combine, -1), *self._adding(combine, -1))
            for variant, values, _ in (self._offering(combine, -1), *sums):
                yield variant, values
        failing = (self.table, 0, DISPATCH_PHASE, self.config.rank)
        yield self._failure_variant(), failing

    def _variant(
        self, key: Any, kernel: Any, constants: dict[str, Any], max_registers: int | None = None
    ) -> CompiledKernel:
        if key not in self._variants:
            self._variants[key] = CompiledKernel(kernel, constants, RING_WARPS, max_registers)
        return self._variants[key]

    def _failure_variant(self) -> CompiledKernel:
        return self._variant("post failure", post_failure_kernel, {"S": self._op_shape})

    def full_sized_launch(self, is_dispatch: bool, block_num: int, warp_per_block: int) -> tuple[int, int, int]:
        """(programs that share the chunks, 0 of channels, warps per program) of a call with as many tokens as there may
        be."""
        num_nodes = None if is_dispatch else 1
        return self._programs(self.config.max_num_inp_token_per_rank, block_num, num_nodes), 0, RING_WARPS

    def _programs(self, max_num_tokens: int, block_num: int, num_nodes: int | None = None) -> int:
        """Programs that share the chunks of a step."""
        num_nodes = self._rings.num_nodes if num_nodes is None else num_nodes
        num_chunks = self._rings.chunks_of_step(max_num_tokens) * num_nodes
        return self._num_programs(num_chunks, block_num, PROGRAMS_PER_SM)
