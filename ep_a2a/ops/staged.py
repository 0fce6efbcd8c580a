"""InterNodeV1 and its kin over torch.distributed: launches around the exchanges between nodes that the host makes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ep_a2a import clock
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
from ep_a2a.memory.agreement import agreed_error
from ep_a2a.ops.arguments import NO_WISH, RECEIVE, SEND, WHOLE
from ep_a2a.ops.engine import Engine
from ep_a2a.ops.failures import COMBINE_PHASE, DISPATCH_PHASE, Failure
from ep_a2a.ops.intra_node import combine_form, dispatch_form, receiving_launch, row_operands
from ep_a2a.ops.op_kernels import OpKernels
from ep_a2a.ops.ring_launches import CHANNEL_REGISTERS, RING_WARPS, THREADS, RingLaunches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.memory.arena import Arena
    from ep_a2a.memory.node_transport import Exchange, NodeTransport
    from ep_a2a.ops.arguments import CombineArguments, LaunchWish, Stages, Step
    from ep_a2a.ops.engine import Launched
    from ep_a2a.ops.memory import BoundMemory

PROGRAMS_PER_SM = 2
"""Programs that share the chunks; each has one line in flight."""


class StagedEngine(Engine):
    """Launches the kernels of one op whose tokens the host moves between nodes, and makes the exchanges.

    A dispatch packs lines for all nodes, the host exchanges them, and the received lines are copied to the ranks of
    this node. A combine offers results to the node, packs the node's sums, the host exchanges them, and the token's own
    rank adds the nodes. Every exchange has the lines of step_tokens tokens for each node, whatever the routing:
    sizes are known on the host, and a graph can hold it.

    A split dispatch begins its exchange in dispatch_send and ends it in dispatch_recv, so the exchange overlaps what is
    launched in between; but not while a graph is captured. A split combine exchanges in combine_recv.

    Args:
        config: the op's.
        memory: bound to it.
        arena: where the memory comes from.
        between_nodes: moves blocks to the ranks of the same local number on other nodes.
    """

    recv_reads_inputs = False

    def __init__(
        self, config: EpDispatchCombineConfig, memory: BoundMemory, arena: Arena, between_nodes: NodeTransport
    ) -> None:
        self.kernels = OpKernels(config, memory.table, arena.device)
        self._ring = RingLaunches(self.kernels)
        self._memory, self._rendezvous, self._between = memory, arena.rendezvous, between_nodes
        self._running: Exchange | None = None
        self._is_connected = self.kernels.interpreted

    def dispatch(self, args: Step, stages: Stages = WHOLE, wish: LaunchWish = NO_WISH) -> None:
        """Launch a dispatch, or one of its halves, on the current stream, and begin or end its exchange."""
        with self._naming_who_is_gone():
            if stages.send:
                self._between.require_open()
                super().dispatch(args, SEND, wish)
                self._running = self._begin(args.step_tokens, back=False)
            if stages.receive:
                self._end()
                super().dispatch(args, RECEIVE, wish)

    def combine(self, args: CombineArguments, stages: Stages = WHOLE, wish: LaunchWish = NO_WISH) -> None:
        """Launch a combine, or one of its halves, on the current stream; the second half makes its exchange."""
        with self._naming_who_is_gone():
            if stages.send:
                super().combine(args, SEND, wish)
            if stages.receive:
                self._between.require_open()
                self._run(self._packing_sums(args, wish.block_num))
                self._running = self._begin(args.step_tokens, back=True)
                self._end(back=True)
                self._run(self._adding(args, wish.block_num))

    def _dispatch_launches(self, args: Step, stages: Stages, wish: LaunchWish) -> Iterable[Launched]:
        if stages.send:
            yield from self._packing(args, wish.block_num)
        if stages.receive:
            yield from self._forwarding(args, wish.block_num)

    def _combine_launches(self, args: CombineArguments, stages: Stages, wish: LaunchWish) -> Iterable[Launched]:
        if stages.send:
            yield self._ring.offering(args, wish.block_num)
        if stages.receive:
            yield from self._packing_sums(args, wish.block_num)
            yield from self._adding(args, wish.block_num)

    def _run(self, launches: Iterable[Launched]) -> None:
        for kernel, values, num_programs in launches:
            kernel.run(num_programs, values, self.kernels.device)

    @contextlib.contextmanager
    def _naming_who_is_gone(self) -> Iterator[None]:
        """Replace a failed exchange's timeout by the ranks' verdict."""
        start = clock.now()
        try:
            yield
        except RankTimeoutError as error:
            memory = self._memory
            failure = Failure.from_record(memory.synchronized_record(), self.kernels.config.world_size)
            key, call, bound_secs = memory.failure_key, failure.call(memory), memory.timeouts.of_step(failure.epoch)
            raise agreed_error(error, memory.peers, key, call, error.missing_ranks, bound_secs, start) from error

    def _begin(self, step_tokens: int, *, back: bool) -> Exchange:
        rings = self._ring.rings
        num_words = rings.node_words(step_tokens, back=back)
        regions = (Region.CHUNKS_BACK, Region.CHUNKS_SENT_BACK) if back else (Region.CHUNKS, Region.STAGED_CHUNKS)
        received, sent = (self._memory.view(region, (rings.num_nodes, num_words)) for region in regions)
        return self._between.begin(received, sent, self._bound_secs(back=back))

    def exchange_in_combine(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Exchange blocks that belong to a combine, ahead of its launches; NodeTransport.begin says of which shape."""
        with self._naming_who_is_gone():
            self._between.require_open()
            self._running = self._between.begin(received, sent, self._bound_secs(back=True))
            self._end(back=True)

    def _end(self, *, back: bool = False) -> None:
        """Ends the running exchange; poisons the ranks of this node if it fails."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            with self._memory.peers.host_record.waiting():
                self._between.end(running, self._bound_secs(back=back))
        except RankTimeoutError as error:
            accused = error.missing_ranks[0] if len(error.missing_ranks) == 1 else NOBODY.value
            phase = COMBINE_PHASE if back else DISPATCH_PHASE
            self._run([self._failing(TIMEOUT.value << 16 | accused, phase)])
            raise

    def _bound_secs(self, *, back: bool) -> float:
        """Timeout of an exchange; doubled for combine, whose ranks may first wait for their own node.

        So the ranks of the node in which one is missing are the first to name it.
        """
        ended = int(self._memory.steps[Stage.COMBINE_RECEIVE]) if self.kernels.interpreted else 0
        return self._memory.timeouts.of_step(ended + 1) * (2 if back else 1)

    def quiet(self) -> None:
        """Connect anew where an exchange has failed, or not ended, on any rank. Collective."""
        is_well = self._between.is_open and self._running is None
        self._running = None
        if not all(self._rendezvous.exchange("exchanges between nodes", is_well)):
            self._between.renew()
            self._is_connected = self.kernels.interpreted
            self._connect()

    def compile(self) -> None:
        """Compile all launches of whole calls; the first time this is collective on GPUs, where it connects nodes."""
        super().compile()
        self._connect()

    def _connect(self) -> None:
        if not self._is_connected:
            # an exchange that connects could not be captured
            self._is_connected = True
            rings = self._ring.rings
            self._between.exchange(
                self._memory.view(Region.CHUNKS, (rings.num_nodes, rings.head_words)),
                self._memory.view(Region.STAGED_CHUNKS, (rings.num_nodes, rings.head_words)),
            )

    def _packing(self, args: Step, block_num: int) -> Iterable[Launched]:
        kernels, ring = self.kernels, self._ring
        key = "pack", dispatch_form(args)
        kernel = self._kernel(key, pack_kernel, lambda: ring.line_constants(args) | {"POISON_LANES": THREADS})
        operands = row_operands(kernels, args, kernels.scale_bytes(args.scales))
        values = (*operands, args.num_tokens, ring.rings.chunks_of_step(args.step_tokens), kernels.config.rank)
        yield ring.numbering(args, block_num, finishes=False)
        yield kernel, values, self._programs(args.step_tokens, block_num)

    def _forwarding(self, args: Step, block_num: int) -> Iterable[Launched]:
        config, ring = self.kernels.config, self._ring
        yield from self._passing_on(args.step_tokens, back=False, has_weights=False)
        values = (
            self.kernels.table,
            ring.rings.chunks_of_step(args.step_tokens),
            args.step_tokens,
            args.row_limit,
            config.world_size * config.max_num_inp_token_per_rank,
            config.rank,
        )
        key = "forward", dispatch_form(args)
        # left alone, ptxas aims at fewer registers and puts words on the stack
        kernel = self._kernel(
            key, forward_kernel, lambda: ring.line_constants(args) | ring.wait_lanes, CHANNEL_REGISTERS
        )
        yield kernel, values, self._programs(args.step_tokens, block_num)
        yield receiving_launch(self.kernels, args)

    def _packing_sums(self, args: CombineArguments, block_num: int) -> Iterable[Launched]:
        # ids are compared where nodes are added
        key = "pack sums", args.weights is None
        kernel = self._kernel(key, pack_sums_kernel, lambda: self._ring.sum_constants(replace(args, ids=None)))
        num_chunks = self._ring.rings.chunks_of_step(args.step_tokens)
        values = (self.kernels.table, num_chunks, self.kernels.config.rank)
        yield kernel, values, self._programs(args.step_tokens, block_num)

    def _adding(self, args: CombineArguments, block_num: int) -> Iterable[Launched]:
        kernels = self.kernels
        yield from self._passing_on(args.step_tokens, back=True, has_weights=args.weights is not None)
        values = (
            args.out,
            kernels.absent if args.ids is None else args.ids,
            *args.biases,
            kernels.table,
            args.num_tokens,
            self._ring.rings.chunks_of_step(args.step_tokens),
            kernels.config.rank,
        )
        key = "sum nodes", combine_form(args)
        kernel = self._kernel(key, sum_nodes_kernel, lambda: self._ring.sum_constants(args))
        yield kernel, values, self._programs(args.step_tokens, block_num, num_nodes=1)

    def _passing_on(self, step_tokens: int, *, back: bool, has_weights: bool) -> Iterable[Launched]:
        ring, num_nodes = self._ring, self._ring.rings.num_nodes
        if num_nodes == 1:
            return
        given = {
            "S": self.kernels.shape,
            "R": ring.back if back else ring.to_experts,
            "HAS_WEIGHTS": has_weights,
        }
        kernel = self._kernel(("pass on", back, has_weights), pass_on_kernel, lambda: given)
        values = (self.kernels.table, ring.rings.chunks_of_step(step_tokens), self.kernels.config.rank)
        yield kernel, values, num_nodes - 1

    def _failing(self, poison: int, phase: int) -> Launched:
        """The launch that tells the ranks of this node of a failure: code << 16 | accused rank."""
        kernel = self._kernel("post failure", post_failure_kernel, lambda: {"S": self.kernels.shape})
        return kernel, (self.kernels.table, poison, phase, self.kernels.config.rank), 1

    def _reachable(self, stages: Stages) -> Iterator[tuple[CompiledKernel, tuple[Any, ...]]]:
        yield from super()._reachable(stages)
        yield self._failing(0, DISPATCH_PHASE)[:2]

    def _kernel(
        self, key: Any, kernel: Any, constants_of: Callable[[], dict[str, Any]], max_registers: int | None = None
    ) -> CompiledKernel:
        return self.kernels.get(key, lambda: CompiledKernel(kernel, constants_of(), RING_WARPS, max_registers))

    def full_sized_launch(self, is_dispatch: bool, wish: LaunchWish) -> tuple[int, int, int]:
        """(programs that share the chunks, 0 of channels, warps per program) of a call with M tokens."""
        num_nodes = None if is_dispatch else 1
        tokens = self.kernels.config.max_num_inp_token_per_rank
        return self._programs(tokens, wish.block_num, num_nodes), 0, RING_WARPS

    def _programs(self, step_tokens: int, block_num: int, num_nodes: int | None = None) -> int:
        """Programs that share the chunks of a step."""
        rings = self._ring.rings
        num_chunks = rings.chunks_of_step(step_tokens) * (rings.num_nodes if num_nodes is None else num_nodes)
        return self._ring.num_programs(num_chunks, block_num, PROGRAMS_PER_SM)
