"""EpDispatchCombineOp: the op whose tokens this package's kernels move, by MORI's name."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Hashable

import torch
from torch.distributed import ProcessGroup

from ep_a2a.config import EpDispatchCombineConfig, Layout
from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import (
    ClosedError,
    ConfigMismatchError,
    InputError,
    RankTimeoutError,
    StateError,
    UnsupportedError,
    max_tokens_named,
)
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import CombineResult
from ep_a2a.kernels.layout import Region
from ep_a2a.memory.arena import Arena, default_device
from ep_a2a.memory.guards import outside_modes
from ep_a2a.memory.rendezvous import telling_before_the_first_meeting
from ep_a2a.ops import inputs
from ep_a2a.ops.arguments import RECEIVE, CombineArguments, LaunchWish, Stages, Step, add_to_cache
from ep_a2a.ops.base_op import BaseOp
from ep_a2a.ops.checked_dispatch import CheckedDispatch, prepare_dispatch, source_positions
from ep_a2a.ops.config_agreement import agree_on_config
from ep_a2a.ops.engine import Engine
from ep_a2a.ops.failures import Failure, error_of
from ep_a2a.ops.intra_node import IntraNodeEngine
from ep_a2a.ops.memory import BoundMemory, Timeouts
from ep_a2a.ops.ring_launches import warn_of_warps
from ep_a2a.ops.rings import RingEngine
from ep_a2a.ops.sm_share import agree_on_share, share_gpu
from ep_a2a.ops.staged import StagedEngine
from ep_a2a.ops.wire_word import tag_mask, tag_shift


class EpDispatchCombineOp(BaseOp):
    """Moves the tokens of one MoE layer among the ranks of a group; `DispatchCombineOp` is the contract of its calls.

    Construction is collective: all ranks build the op together, with configs that agree.

    Args:
        config: shapes and choices.
        arena: where memory comes from; None takes the one that shmem_torch_process_group_init made.
        group: in place of an arena, the ranks that take part. The op then owns its memory, which `close` gives back;
            it lies on the current CUDA device, or on the CPU without one.
        index: ops of one arena whose steps overlap (micro-batches) need different indices; ops of equal index share
            memory. None gives this op memory of its own.

    Attributes:
        memory: views of the op's memory, and the table of addresses that kernels read.
        engine: compiles and launches the kernels.
        close_after: `close` calls it last, to give back the memory of an op that owns its memory; else None.

    Raises:
        InputError: both an arena and a group are given.
        ConfigMismatchError: configs differ between ranks; the error names the field and the ranks.
        RankTimeoutError: ranks did not come to build the op.
        UnsupportedError: the kernel type is not available, or too many ranks and ops share a GPU.
    """

    @outside_modes()
    def __init__(
        self,
        config: EpDispatchCombineConfig,
        *,
        arena: Arena | None = None,
        index: int | None = None,
        group: ProcessGroup | None = None,
        _is_agreed: bool = False,
    ) -> None:
        self.close_after: Callable[[], None] | None = None
        if group is not None:
            if arena is not None:
                raise InputError("an arena or a group", "both", "Pass one of them.")
            with telling_before_the_first_meeting(group):
                device = default_device()
            arena = Arena(group, device)
            self.close_after = arena.close
        if arena is None:
            from ep_a2a.shmem import default_arena

            arena = default_arena()
        self.arena = arena
        with arena.rendezvous.telling():
            self.index = arena.unshared_index() if index is None else index
            if not _is_agreed:
                inputs.check_construction(config, arena, index)
                agree_on_config(config, arena.rendezvous, self.index)
            share = agree_on_share(config, arena, self.index)
            self.memory = BoundMemory(config, arena, self.index)
            self.memory.acquired.user = weakref.ref(self)
            super().__init__(config, arena.device, self.memory.acquired.shared_blocks.streams)
            self.engine = make_engine(config, self.memory, arena)
            share_gpu(share, self, arena)
            self._checked_calls: dict[Hashable, CheckedDispatch] = {}
            self._agreed_max_sms: set[int] = set()
            self._telling_between_nodes = arena.rendezvous.telling if config.uses_rings else contextlib.nullcontext
            max_tokens, self._most_rows = config.max_num_inp_token_per_rank, config.max_num_expert_rows
            self._tag_mask, self._tag_shift = tag_mask(max_tokens), tag_shift(max_tokens)
            self._result, self._result_weights = map(self.memory.view, (Region.RESULT, Region.RESULT_WEIGHTS))
            by_expert = config.layout == Layout.EXPERT_MAJOR
            self._reduced_rows = self.memory.view(Region.REDUCED_ROWS) if by_expert else None
            arena.together("initialising the op", self._initialize)

    def _initialize(self) -> None:
        self.memory.initialize(refill=False)
        self.engine.compile()

    def _checked_wish(self, block_num: int, warp_per_block: int) -> LaunchWish:
        inputs.check_integer("block_num", block_num)
        inputs.check_integer("warp_per_block", warp_per_block)
        if warp_per_block > 0 and self.config.uses_rings:
            warn_of_warps(f"warp_per_block={warp_per_block}")
        return LaunchWish(block_num, warp_per_block)

    def _prepare_dispatch(self, step: Step) -> None:
        """Check the arguments of a dispatch, and take the memory that ops of this index share."""
        tokens, weights, scales, ids, tag = step.tokens, step.weights, step.scales, step.ids, step.tag
        # a checked call may come with another tag; of an int from 0 to 2**31 - 1, which needs no check, nothing is left
        if type(tag) is not int or tag >> 31:
            inputs.check_tag(tag)
        # 4.0 equals 4, so that a checked call would be found for it
        if type(step.step_tokens) is not int or type(step.pad_id) is not int:
            step.step_tokens = inputs.checked_bounds(self.config, step.step_tokens)
            inputs.check_integer("pad_id", step.pad_id)
        key = (step.step_tokens, step.pad_id, inputs.signature(tokens, weights, scales, ids))
        checked = self._checked_calls.get(key)
        if checked is None:
            with max_tokens_named(self._max_tokens_name):
                checked = add_to_cache(self._checked_calls, key, prepare_dispatch(self.memory, self.device, step))
        inputs.check_dispatch_addresses(tokens, scales)
        inputs.check_outside(self.memory.received, input=tokens, weights=weights, scales=scales, indices=ids)
        self.memory.acquired.shared_blocks.enter(self)
        if not checked.scales_travel:
            step.scales = checked.stand_in
        step.num_tokens, step.bounds = checked.num_tokens, checked.bounds
        step.wire_word = checked.wire_word | (tag & self._tag_mask) << self._tag_shift
        step.dispatched, step.combines = checked.received, checked.combines

    def _run_dispatch(self, step: Step, stages: Stages, wish: LaunchWish) -> None:
        try:
            self.engine.dispatch(step, stages, wish)
        except StateError:
            # refused before its first launch
            self.memory.acquired.shared_blocks.leave(self)
            raise
        if step.counts_experts:
            self.engine.count_local_experts(self.local_expert_count)
        if stages.receive:
            step.forget_inputs()
        elif self.engine.recv_reads_inputs:
            step.copy_inputs()

    def _finish_dispatch(self, step: Step) -> None:
        self.engine.dispatch(step, RECEIVE)
        if self.engine.recv_reads_inputs and self.device.type == "cuda":
            # the copies may belong to another stream, whose next work must not get their memory yet
            for copy in step.inputs:
                copy.record_stream(torch.cuda.current_stream(self.device))
        step.forget_inputs()

    def _prepare_combine(self, step: Step, args: CombineArguments) -> None:
        rows, weights, ids, out = args.rows, args.weights, args.ids, args.out
        # MORI's callers pass an empty tensor for no weights; but those of no rows are empty, too
        if (
            isinstance(weights, torch.Tensor)
            and not weights.numel()
            and weights.shape != (*step.lead, self.config.topk)
        ):
            args.weights = weights = None
        if isinstance(rows, torch.Tensor) and rows.dim() == 2 and rows.shape[0] == self._most_rows:
            args.rows = rows = rows[: math.prod(step.lead)]  # the whole registered buffer may be passed
        key = inputs.signature(rows, weights, ids)
        if key not in step.combines:
            inputs.check_combine(self.config, self.device, args, step.lead, step.num_tokens)
            step.combines.add(key)
        inputs.check_alignment("input", rows)
        if ids is not None:
            inputs.address_of("indices", ids)
        bias_0, bias_1 = args.biases
        inputs.check_token_rows(self.config, self.device, step.num_tokens, out=out, bias_0=bias_0, bias_1=bias_1)
        if out is not None:
            inputs.check_outside(self.memory.received, out=out)
            if weights is not None:
                inputs.check_apart("out", out, weights, "the weights to be summed")
        args.out = result = self._result if out is None else out
        inputs.check_apart("out", result, rows, "the rows to be combined")
        args.num_tokens, args.bounds = step.num_tokens, step.bounds
        args.rows = self._beyond_peers(args, rows, "combine_rows", self._most_rows)
        if weights is not None:
            inputs.check_apart("weights", weights, self._result_weights, "the weight sums that combine returns")
            args.weights = self._beyond_peers(args, weights, "combine_weights", self._most_rows)
        for place, bias in enumerate((bias_0, bias_1)):
            if bias is not None:
                inputs.check_same_or_apart(f"bias_{place}", bias, result)
                most_rows = self.config.max_num_inp_token_per_rank
                args.biases[place] = self._beyond_peers(args, bias, f"combine_bias_{place}", most_rows)
        if self._reduced_rows is not None:
            args.rows, args.expert_rows = self._reduced_rows, args.rows

    def _beyond_peers(self, args: CombineArguments, tensor: torch.Tensor, role: str, most_rows: int) -> torch.Tensor:
        """The tensor, or where peers may overwrite it during combine a copy, which combine makes first."""
        if tensor.data_ptr() not in self.memory.dispatch_addresses:
            return tensor
        target = self.memory.copy_target(role, tensor, most_rows)
        args.copies += ((target, tensor),)
        return target

    def _run_combine(self, step: Step, args: CombineArguments, stages: Stages, wish: LaunchWish) -> CombineResult:
        self.engine.combine(args, stages, wish)
        if not stages.receive:
            step.combining = args
        assert args.out is not None
        return CombineResult(args.out, None if args.weights is None else self._result_weights)

    def _finish_combine(self, step: Step) -> None:
        self.engine.combine(step.combining, RECEIVE)

    @functools.cached_property
    def recv_counts(self) -> torch.Tensor:
        """[W] int32, the rows received from each source in the last dispatch."""
        return self.memory.view(Region.RECV_COUNTS, (self.config.world_size,))

    @functools.cached_property
    def local_expert_count(self) -> torch.Tensor:
        """[E] int32, the received slots per expert of this rank, after dispatch(call_local_expert_count=True)."""
        return self.memory.view(Region.EXPERT_COUNTS, (self.config.num_local_experts,))

    @functools.cached_property
    def expert_recv_count(self) -> torch.Tensor:
        """[E] int32, the rows per expert of this rank, in layout expert_major."""
        return self.memory.view(Region.EXPERT_RECV_COUNT, (self.config.num_local_experts,))

    @property
    def _combine_input(self) -> torch.Tensor:
        return self.memory.combine_input()

    @outside_graphs
    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """[total_recv] int32: source rank * (W * M) + source token of each row. The host waits for the GPU."""
        return source_positions(self.memory, self.recv_counts.tolist())

    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]:
        """(programs, those that exchange chunks between nodes, warps per program) of a call with M tokens."""
        return self.engine.full_sized_launch(is_dispatch, LaunchWish(block_num, warp_per_block))

    def set_max_sms(self, max_sms: int, *, shares_sm: bool = False) -> None:
        """Bound the multiprocessors that launches use from now on; 0 = all.

        Inside a node the call is local. Between nodes it is made on all ranks with the same bound, and is collective
        for a bound that the op has not had before.

        Args:
            max_sms: the bound.
            shares_sm: whether products run on the same multiprocessors meanwhile. Each multiprocessor then gets one
                program of 128 threads with at most 96 registers, in steps that a low-latency dispatch does not take.
                Without effect where a call, or launch="manual", gives launch numbers.

        Raises:
            ConfigError: max_sms is no integer >= 0.
            UnsupportedError: shares_sm of an op between nodes.
            ConfigMismatchError: between nodes, another rank has given another bound, or raised an error.
        """
        with self._telling_between_nodes():
            is_between_nodes = self.config.uses_rings
            if shares_sm and is_between_nodes:
                raise UnsupportedError("shares_sm of an op inside a node", "an op between nodes", field="shares_sm")
            self.engine.limit_sms(checked_integer("max_sms", max_sms, 0), shares_sm=shares_sm)
            if is_between_nodes and max_sms not in self._agreed_max_sms:
                bounds = self.arena.rendezvous.exchange("max_sms", max_sms)
                if len(set(bounds)) > 1:
                    raise ConfigMismatchError("the same max_sms on all ranks", f"by rank {bounds}")
                self._agreed_max_sms.add(max_sms)

    def warmup_split(self) -> None:
        """Compile the kernels of split calls, now and when launches change, so that a graph can capture them. Local."""
        self.engine.warmup_split()

    def record_spans(self) -> None:
        """Launch kernels that note times from now on, for StepProfiler to read. Local."""
        self.engine.record_spans()

    @outside_modes()
    def set_timeout(self, timeout_secs: float) -> None:
        """Bound the waits of calls and of graph replays from now on, also in the first step. Local."""
        timeouts = Timeouts.same(timeout_secs)
        self.streams.follow(self.device)
        self.memory.set_timeouts(timeouts)

    def active_ranks(self) -> tuple[int, ...]:
        """The ranks that are not masked, ascending; with on_rank_loss="fail" all of them. Local."""
        return tuple(sorted(set(range(self.config.world_size)) - self.memory.poison.masked))

    def step_fault(self) -> torch.Tensor:
        """A bool [1] on the device: whether ranks were masked since the last call, in the order of the current stream.

        The step in which a rank is lost may lack its part, or part of it: its ranks agree on repeating it. A graph may
        capture this call. Local.
        """
        masked, reported = self.memory.poison.masked_there.clone(), self.memory.poison.reported
        is_new: torch.Tensor = masked != reported
        reported.copy_(masked)
        return is_new

    def check(self) -> None:
        """Raise the first error that the kernels have recorded; never blocks.

        Raises:
            ClosedError: the op or its arena has been closed.
            RankTimeoutError, AlternationError, ConfigMismatchError, CapacityError, ForeignIndicesError: as recorded.
        """
        if self.arena.closed:
            raise ClosedError("an open op", "a closed one")
        if self.config.masks:
            self.memory.peers.catch_up()
        if self.config.rank in self.memory.poison.masked:
            raise RankTimeoutError(
                "this rank to come to every step within mask_after_secs",
                "the other ranks go on without it",
                "Call reset on all ranks, or end this process. Let it keep up, or raise mask_after_secs.",
                late_ranks=(self.config.rank,),
            )
        if self.memory.record_words[0]:
            failure = Failure.from_record(self.memory.synchronized_record(), self.config.world_size)
            raise error_of(failure, self.memory, self.memory.epochs_seen(failure.phase))

    @outside_modes()
    def reset(self) -> None:
        """Drop the open step and make the op usable again after an error. Collective; masked ranks that live come back.

        Raises:
            ClosedError: the op or its arena has been closed.
            RankTimeoutError: ranks did not come, or their processes have ended.
        """
        with self.arena.rendezvous.telling():
            if self._closed or self.arena.closed:
                raise ClosedError("an open op", "a closed one")
            self._process.require("the op")
            self.engine.quiet()
            self._end_step()
            self.arena.together("resetting the op", lambda: self.memory.initialize(refill=True))

    def _end_step(self) -> None:
        super()._end_step()
        self.memory.acquired.shared_blocks.leave(self)

    @outside_modes()
    def close(self) -> None:
        """End the use of the op; a second call does nothing.

        Its memory stays with the arena for the next op of its kind, and the call is local. An op that owns its memory
        (make_op, group=) gives it back: call it on every rank then; it waits 3 seconds at most for the others. Every
        other method and property but `closed`, `config` and `device` raises ClosedError from then on.
        """
        super().close()

    def _close(self) -> None:
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)  # running kernels may yet fail
        is_open = self.has_open_step or self._left is not None
        if is_open or (not self.arena.closed and (self.memory.record_words[0] or self.memory.poisoned)):
            self.memory.acquired.shared_blocks.spoil()
        self._end_step()
        self.memory.acquired.user = None
        self.arena.give_back(self.index)
        if self.close_after is not None:
            self.close_after()


def make_engine(config: EpDispatchCombineConfig, memory: BoundMemory, arena: Arena) -> Engine:
    """Choose the engine of an op. InterNode, the flat form, takes IntraNode's: every rank stores to every other."""
    if config.is_staged and arena.between_nodes is not None:
        return StagedEngine(config, memory, arena, arena.between_nodes)
    return (RingEngine if config.uses_rings else IntraNodeEngine)(config, memory.table, arena.device)
