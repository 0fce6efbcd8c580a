"""InterNodeV1 and its kin over torch.distributed: launches around the exchanges between nodes that the host makes."""

import contextlib
from collections.abc import Iterator

import torch

from ep_a2a import clock
from ep_a2a.config import EpDispatchCombineConfig
from ep_a2a.errors import RankTimeoutError
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.layout import FailureCode, Region, Stage
from ep_a2a.kernels.primitives import NOBODY
from ep_a2a.kernels.staged_kernels import (
    forward_kernel,
    pack_kernel,
    pack_sums_kernel,
    pass_on_kernel,
    post_failure_kernel,
    sum_nodes_kernel,
)
from ep_a2a.memory.agreement import agreed_error
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.node_transport import Exchange, NodeTransport
from ep_a2a.memory.verdict import GivenUp
from ep_a2a.ops.arguments import NO_WISH, RECEIVE, SEND, WHOLE, CombineArguments, LaunchWish, Stages, Step
from ep_a2a.ops.failures import COMBINE_PHASE, DISPATCH_PHASE, Failure
from ep_a2a.ops.intra_node import receiving_launch
from ep_a2a.ops.launches import TABLE, CombineForm, DispatchForm, KernelLaunch, no_operands, row_operands, sum_operands
from ep_a2a.ops.memory import BoundMemory
from ep_a2a.ops.ring_launches import CHANNEL_REGISTERS, RING_WARPS, THREADS, NodesEngine

PROGRAMS_PER_SM = 2
"""Programs that share the chunks; each has one line in flight. Two, as in rings.py; other numbers were not timed."""


class StagedEngine(NodesEngine):
    """Launches the kernels of one op whose tokens the host moves between nodes, and makes the exchanges.

    A dispatch packs lines for all nodes, the host exchanges them, and the received lines are copied to the ranks of
    this node. A combine offers results to the node, packs the node's sums, the host exchanges them, and the token's own
    rank adds the nodes. Every exchange has the lines of the step's largest bound for each node, whatever the routing:
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
        super().__init__(config, memory.table, arena.device)
        self._memory, self._rendezvous, self._between = memory, arena.rendezvous, between_nodes
        self._running: Exchange | None = None
        self._is_connected = self.kernels.interpreted
        self._post_failure = CompiledKernel(post_failure_kernel, (TABLE,), {"S": self.kernels.shape}, RING_WARPS)

    def dispatch(self, args: Step, stages: Stages = WHOLE, wish: LaunchWish = NO_WISH) -> None:
        """Launch a dispatch, or one of its halves, on the current stream, and begin or end its exchange."""
        with self._naming_who_is_gone():
            if stages.send:
                self._between.require_open()
                super().dispatch(args, SEND, wish)
                self._running = self._begin(args.bounds.most, back=False)
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
                form = CombineForm.of(args)
                self._run(self._packing_sums, args, form, wish)
                self._running = self._begin(args.bounds.most, back=True)
                self._end(back=True)
                self._run(self._adding, args, form, wish)

    def _dispatch_launches(self, form: DispatchForm, stages: Stages, wish: LaunchWish) -> Iterator[KernelLaunch]:
        if stages.send:
            yield self.numbering(form, wish.block_num, finishes=False)
            yield self._packing(form, wish)
        if stages.receive:
            yield from self._passing_on(form.bounds.most, back=False, has_weights=False)
            yield self._forwarding(form, wish)
            yield receiving_launch(self.kernels, form)

    def _combine_launches(self, form: CombineForm, stages: Stages, wish: LaunchWish) -> Iterator[KernelLaunch]:
        if stages.send:
            yield self.offering(form, wish.block_num)
        if stages.receive:
            yield from self._packing_sums(form, wish)
            yield from self._adding(form, wish)

    @contextlib.contextmanager
    def _naming_who_is_gone(self) -> Iterator[None]:
        """Replace a failed exchange's timeout by the ranks' verdict."""
        start = clock.now()
        try:
            yield
        except RankTimeoutError as error:
            memory = self._memory
            failure = Failure.from_record(memory.synchronized_record(), self.config.world_size)
            call, awaited, bound_secs = (
                failure.call(memory),
                error.missing_ranks,
                memory.timeouts.of_step(failure.epoch),
            )
            given_up = GivenUp(memory.failure_key, call, awaited, waited=True, at=clock.now())
            raise agreed_error(error, memory.peers, given_up, bound_secs, start) from error

    def _begin(self, step_tokens: int, *, back: bool) -> Exchange:
        """Begins the host's exchange: D3 of kernels/staged_kernels.py, or C4 where `back`."""
        rings = self.rings
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
            values = (self.kernels.table, FailureCode.TIMEOUT << 16 | accused, phase, self.config.rank)
            self._post_failure.run(1, values, self.kernels.device)
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
            rings = self.rings
            self._between.exchange(
                self._memory.view(Region.CHUNKS, (rings.num_nodes, rings.head_words)),
                self._memory.view(Region.STAGED_CHUNKS, (rings.num_nodes, rings.head_words)),
            )

    def _packing(self, form: DispatchForm, wish: LaunchWish) -> KernelLaunch:
        num_chunks = self.rings.chunks_of_step(form.bounds.most)
        return self.kernels.launch(
            pack_kernel,
            row_operands,
            form.read_as(self.config),
            self.line_constants(form) | {"POISON_LANES": THREADS},
            RING_WARPS,
            numbers=(form.num_tokens, form.bounds.first_row, num_chunks, self.config.rank),
            num_programs=self._programs(form.bounds.most, wish.block_num),
        )

    def _forwarding(self, form: DispatchForm, wish: LaunchWish) -> KernelLaunch:
        config, most = self.config, form.bounds.most
        sizes = self.rings.chunks_of_step(most), form.bounds.num_rows
        return self.kernels.launch(
            forward_kernel,
            no_operands,
            None,
            self.line_constants(form) | self.wait_lanes,
            RING_WARPS,
            numbers=(*sizes, config.world_size * config.max_num_inp_token_per_rank, config.rank),
            num_programs=self._programs(most, wish.block_num),
            # left alone, ptxas aims at fewer registers and puts words on the stack
            max_registers=CHANNEL_REGISTERS,
        )

    def _packing_sums(self, form: CombineForm, wish: LaunchWish) -> Iterator[KernelLaunch]:
        yield self.kernels.launch(
            pack_sums_kernel,
            no_operands,
            None,
            # ids are compared where nodes are added
            self.sum_constants(form._replace(has_ids=False)),
            RING_WARPS,
            numbers=(self.rings.chunks_of_step(form.bounds.most), self.config.rank),
            num_programs=self._programs(form.bounds.most, wish.block_num),
        )

    def _adding(self, form: CombineForm, wish: LaunchWish) -> Iterator[KernelLaunch]:
        yield from self._passing_on(form.bounds.most, back=True, has_weights=form.has_weights)
        yield self.kernels.launch(
            sum_nodes_kernel,
            sum_operands,
            form.read_as(self.config),
            self.sum_constants(form),
            RING_WARPS,
            numbers=(form.num_tokens, self.rings.chunks_of_step(form.bounds.most), self.config.rank),
            num_programs=self._programs(form.bounds.most, wish.block_num, num_nodes=1),
        )

    def _passing_on(self, step_tokens: int, *, back: bool, has_weights: bool) -> Iterator[KernelLaunch]:
        if self.rings.num_nodes > 1:
            rings = self.back if back else self.to_experts
            yield self.kernels.launch(
                pass_on_kernel,
                no_operands,
                None,
                {"S": self.kernels.shape, "R": rings, "HAS_WEIGHTS": has_weights},
                RING_WARPS,
                numbers=(self.rings.chunks_of_step(step_tokens), self.config.rank),
                num_programs=self.rings.num_nodes - 1,
            )

    def _reachable(self, stages: Stages) -> Iterator[CompiledKernel]:
        yield from super()._reachable(stages)
        yield self._post_failure

    def full_sized_launch(self, is_dispatch: bool, wish: LaunchWish) -> tuple[int, int, int]:
        """(programs that share the chunks, 0 of channels, warps per program) of a call with M tokens."""
        num_nodes = None if is_dispatch else 1
        tokens = self.config.max_num_inp_token_per_rank
        return self._programs(tokens, wish.block_num, num_nodes), 0, RING_WARPS

    def _programs(self, step_tokens: int, block_num: int, num_nodes: int | None = None) -> int:
        """Programs that share the chunks of a step."""
        rings = self.rings
        num_chunks = rings.chunks_of_step(step_tokens) * (rings.num_nodes if num_nodes is None else num_nodes)
        return self.num_programs(num_chunks, block_num, PROGRAMS_PER_SM)
