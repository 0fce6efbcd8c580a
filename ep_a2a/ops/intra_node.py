"""IntraNode: an engine whose kernels store straight into the memory of all ranks.

Engines between nodes end a dispatch by the same receiving stage (`receiving_launch`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from ep_a2a.config import FP8_DTYPE, QuantType
from ep_a2a.kernels.bulk_dispatch_kernels import bulk_dispatch_kernel
from ep_a2a.kernels.combine_kernels import combine_kernel
from ep_a2a.kernels.compilation import compile_all
from ep_a2a.kernels.compiled_kernel import REGISTER_GRANULARITY, CompiledKernel
from ep_a2a.kernels.constants import Block, BulkDispatch, Combine, LowLatencyDispatch, Scales, Tile, constants
from ep_a2a.kernels.layout import WORD_BYTES, count_bits, padded, side_words
from ep_a2a.kernels.ll_dispatch_kernels import ll_dispatch_kernel
from ep_a2a.kernels.target import REGISTERS_PER_SM
from ep_a2a.ops.arguments import NO_WISH, RECEIVE, SEND, WHOLE, Step, add_to_cache
from ep_a2a.ops.engine import Engine
from ep_a2a.ops.inputs import elements_of
from ep_a2a.ops.op_kernels import OpKernels
from ep_a2a.ops.row_constants import MANY_TOKENS, row_constants, scale_constants
from ep_a2a.ops.warmup_args import warmup_combines, warmup_dispatches
from ep_a2a.policy import (
    DISPATCH_WARPS,
    FLAG_PROGRAMS,
    MAX_COUNTED_ALONE,
    SHARED_REGISTERS,
    THREADS_PER_SM,
    Launch,
    Phase,
    choose_launch,
    dispatch_phase,
    fit,
    launch_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.arguments import CombineArguments, LaunchWish, Stages
    from ep_a2a.ops.engine import Launched


BLOCK_TOKENS = 64
"""Tokens whose destinations a program works out at once, where it counts its own."""
TILE_LOAD_BYTES = 16
"""Bytes that a thread loads at once of a tile's rows."""
CAST_PARTS, PLAIN_PARTS = 2, 4
"""Parts of a tile's rows under way at once, as many as registers hold: with a cast, and without."""
LISTED_WORDS, LEAST_LISTED = 1024, 16
"""Pairs of a token and a rank that a program works out at once, where it lists destinations; and the fewest tokens."""
WARP_LANES, LEAST_LISTED_SOON = 32, 8
"""The same for tiles of one token, whose first row shall leave soon: one warp lists so few pairs without a barrier."""
LL_PROGRAMS_PER_SM = 2
"""Programs of a low-latency dispatch, unless they are wide, that a multiprocessor must hold for some registers less."""
THREADS_BESIDE_DISPATCH = {4: 512, 8: 384}
"""Threads of a combine that may start early which must fit beside one of those programs: as many as do without a word
on the stack. By the bytes that an element has at all ranks together, which threads hold; with more there is no room."""
LOOK_BACK_LANES, SHARED_LOOK_BACK_LANES = 2048, 512
"""Words that a program reads at once to learn how many rows the programs before it send; and a small one."""
RECEIVING = Launch(1, DISPATCH_WARPS)


class IntraNodeEngine(Engine):
    """Launches one kernel per call, in the interpreter one per half. Plans are kept by the form of the call.

    Args:
        config: the op's.
        table: address table on the device, int64 [regions, W].
        device: where the kernels run; CPU means Triton's interpreter.
    """

    recv_reads_inputs = False

    def __init__(self, config: EpDispatchCombineConfig, table: torch.Tensor, device: torch.device) -> None:
        self.kernels = OpKernels(config, table, device)

    def _dispatch_launches(self, args: Step, stages: Stages, wish: LaunchWish) -> Iterable[Launched]:
        kernels = self.kernels
        key = args.num_tokens, args.step_tokens, dispatch_form(args), stages, wish
        found = kernels.plans.get(key)
        if found is None:
            phase = dispatch_phase(kernels.config, args.step_tokens)
            launch = self.launch_of(phase, args.num_tokens, args.step_tokens, wish)
            kernel_of = functools.partial(dispatch_kernel, kernels, args, phase, launch)
            plan = make_plan(kernels, phase, launch, stages, kernel_of, dispatch_values(kernels, args, phase, launch))
            found = add_to_cache(kernels.plans, key, (phase, plan))
        phase, plan = found
        return [(kernel, dispatch_values(kernels, args, phase, launch), programs) for kernel, launch, programs in plan]

    def _combine_launches(self, args: CombineArguments, stages: Stages, wish: LaunchWish) -> Iterable[Launched]:
        kernels = self.kernels
        key = Phase.COMBINE, args.num_tokens, args.step_tokens, combine_form(args), stages, wish
        plan = kernels.plans.get(key)
        if plan is None:
            launch = self.launch_of(Phase.COMBINE, args.num_tokens, args.step_tokens, wish)
            kernel_of = functools.partial(self._combine_kernel, args, launch, in_place=stages == WHOLE)
            values = self._combine_values(args, launch)
            plan = add_to_cache(
                kernels.plans, key, make_plan(kernels, Phase.COMBINE, launch, stages, kernel_of, values)
            )
        return [(kernel, self._combine_values(args, launch), programs) for kernel, launch, programs in plan]

    def launch_of(self, phase: Phase, num_tokens: int, step_tokens: int, wish: LaunchWish = NO_WISH) -> Launch:
        """Launch numbers of a call."""
        kernels = self.kernels
        config, num_sms = kernels.config, kernels.num_sms
        return choose_launch(
            config, phase, num_tokens, step_tokens, num_sms, *wish, kernels.max_sms, shares_sm=kernels.shares_sm
        )

    def full_sized_launch(self, is_dispatch: bool, wish: LaunchWish) -> tuple[int, int, int]:
        """(programs, 0 that exchange chunks between nodes, warps per program) of a call with M tokens."""
        config = self.kernels.config
        tokens = config.max_num_inp_token_per_rank
        phase = dispatch_phase(config, tokens) if is_dispatch else Phase.COMBINE
        launch = self.launch_of(phase, tokens, tokens, wish)
        return launch.num_programs, 0, launch.num_warps

    def _reachable(self, stages: Stages) -> Iterator[tuple[CompiledKernel, tuple[Any, ...]]]:
        kernels = self.kernels
        config = kernels.config
        shapes = launch_shapes(config, kernels.num_sms, kernels.max_sms, shares_sm=kernels.shares_sm)
        dispatches = list(warmup_dispatches(config, kernels.device))
        combines = list(warmup_combines(config, kernels.device))
        for phase, tokens, launch in (each for each in shapes if each[0] is not Phase.COMBINE):
            for dispatch in (replace(each, step_tokens=tokens) for each in dispatches):
                kernel = dispatch_kernel(kernels, dispatch, phase, launch, stages)
                yield kernel, dispatch_values(kernels, dispatch, phase, launch)
        for _, tokens, launch in (each for each in shapes if each[0] is Phase.COMBINE):
            for combine in (replace(each, step_tokens=tokens) for each in combines):
                kernel = self._combine_kernel(combine, launch, stages, in_place=stages == WHOLE)
                yield kernel, self._combine_values(combine, launch)

    def _combine_kernel(
        self, args: CombineArguments, launch: Launch, stages: Stages, *, in_place: bool
    ) -> CompiledKernel:
        kernels = self.kernels
        elements = launch.send_rows, launch.send_elements, launch.add_elements
        shape = launch.num_warps, elements, launch.read_ahead, launch.dependent, launch.shares_sm
        key = Phase.COMBINE, combine_form(args), shape, stages, in_place, kernels.spans

        def make() -> CompiledKernel:
            num_warps, config, results = launch.num_warps, kernels.config, kernels.results
            # weights [., TOPK] move as blocks of one group
            lanes = max(padded(config.topk), 32 * num_warps)
            combine = {
                "DTYPE": results.dtype,
                "CHECK_INDICES": args.ids is not None,
                "OWN_IN_PLACE": in_place and not results.quantized,
                "READ_AHEAD": launch.read_ahead,
            }
            given = {
                "S": kernels.shape,
                "SENT": results.block(config.hidden_dim, launch.send_elements, num_warps, launch.send_rows),
                "ADDED": results.block(config.hidden_dim, launch.add_elements, num_warps, adds=True),
                "WEIGHTS": Block(*map(tl.constexpr, (config.topk, lanes, 1, tl.int32, tl.float32, False, False, 1))),
                "COMBINE": constants(Combine, combine),
                "FORM": kernels.form(stages, launch, has_weights=args.weights is not None),
            }
            max_registers = _combine_registers(launch, config.world_size * config.combined_dtype.itemsize)
            return CompiledKernel(combine_kernel, given, num_warps, max_registers, shares_sm=launch.shares_sm)

        return kernels.get(key, make)

    def _combine_values(self, args: CombineArguments, launch: Launch) -> tuple[Any, ...]:
        kernels = self.kernels
        config, absent = kernels.config, kernels.absent
        return (
            kernels.result_rows(args.rows),
            absent if args.weights is None else args.weights.view(torch.int32),
            args.out,
            absent if args.ids is None else args.ids,
            *args.biases,
            kernels.table,
            args.num_tokens,
            args.step_tokens,
            config.max_num_inp_token_per_rank,
            config.rank,
            launch.num_receivers,
            launch.shared_from,
            launch.pause_ns,
        )


def _combine_registers(launch: Launch, element_bytes: int) -> int:
    """The most registers per thread with which as many programs fit as the policy asks for.

    Left to itself the compiler spills some in order to fit one program more. Programs that may start beside those of
    their dispatch find some room there: a program of a low-latency dispatch holds half of a multiprocessor's registers.

    Args:
        launch: of the combine.
        element_bytes: of an element of a sum, times the ranks.
    """
    if launch.shares_sm:
        return SHARED_REGISTERS
    threads = 32 * launch.num_warps
    num_programs = max(1, THREADS_PER_SM[Phase.COMBINE] // threads)
    registers = REGISTERS_PER_SM // (num_programs * threads)
    if launch.dependent and not launch.read_ahead:
        beside = next((room for most, room in THREADS_BESIDE_DISPATCH.items() if element_bytes <= most), 1)
        registers = min(registers, REGISTERS_PER_SM // LL_PROGRAMS_PER_SM // beside)
    return registers // REGISTER_GRANULARITY * REGISTER_GRANULARITY


def dispatch_form(args: Step) -> Hashable:
    """The part of the arguments on which kernels depend: the dtype, and which tensors there are."""
    return args.tokens.dtype, args.scales is None, args.weights is None


def combine_form(args: CombineArguments) -> Hashable:
    """The part of the arguments on which kernels depend: which tensors there are."""
    return args.weights is None, args.ids is None, args.biases[0] is None, args.biases[1] is None


def dispatch_kernel(kernels: OpKernels, args: Step, phase: Phase, launch: Launch, stages: Stages) -> CompiledKernel:
    """The kernel of a dispatch, or of one of its halves.

    Args:
        kernels: of the op.
        args: the call's.
        phase: LOW_LATENCY_DISPATCH or BULK_DISPATCH.
        launch: its launch numbers.
        stages: the halves of the call that the launch does.
    """
    dependent = launch.dependent and kernels.can_depend
    shape = (
        launch.num_warps,
        _tile_tokens(kernels, args, launch),
        launch.sparse_polls,
        dependent,
        args.step_tokens <= MAX_COUNTED_ALONE,
        launch.shares_sm,
    )
    key = phase, dispatch_form(args), shape, stages, kernels.spans

    def make() -> CompiledKernel:
        given = {
            "S": kernels.shape,
            "OWNERS": kernels.placement,
            "FORM": kernels.form(stages, launch, has_weights=args.weights is not None),
        }
        if phase is Phase.BULK_DISPATCH:
            given |= _bulk_constants(kernels, args, launch)
            most = SHARED_REGISTERS if launch.shares_sm else None
            return CompiledKernel(bulk_dispatch_kernel, given, launch.num_warps, most, shares_sm=launch.shares_sm)
        given |= _low_latency_constants(kernels, args, launch)
        threads = 32 * launch.num_warps
        # a program of THREADS_PER_SM threads or more has a multiprocessor to itself
        num_programs = min(LL_PROGRAMS_PER_SM, max(1, THREADS_PER_SM[phase] // threads))
        max_registers = REGISTERS_PER_SM // (num_programs * threads)
        return CompiledKernel(ll_dispatch_kernel, given, launch.num_warps, max_registers)

    return kernels.get(key, make)


def _low_latency_constants(kernels: OpKernels, args: Step, launch: Launch) -> dict[str, Any]:
    config, casts, threads = kernels.config, kernels.casts(args.tokens), 32 * launch.num_warps
    low_latency = {
        "SLOTS": config.low_latency_tokens,
        "TOKEN_LANES": padded(config.low_latency_tokens),
        "COUNT_BITS": count_bits(config.low_latency_tokens),
        "SCALE_WORDS": config.num_scales,
        "HAS_SCALES": config.num_scales > 0 and (casts or args.scales is not None),
        "COUNT_LANES": kernels.count_lanes(threads),
        "POISON_LANES": threads,
        "SIDE_LANES": max(padded(side_words(config) + 1), threads),
        "SPARSE_POLLS": launch.sparse_polls,
    }
    return {
        "ROW": row_constants(config, casts=casts, least_words=threads),
        "LL": constants(LowLatencyDispatch, low_latency),
    }


def _bulk_constants(kernels: OpKernels, args: Step, launch: Launch) -> dict[str, Any]:
    config, threads = kernels.config, 32 * launch.num_warps
    look_back = SHARED_LOOK_BACK_LANES if launch.shares_sm else LOOK_BACK_LANES
    bulk = {
        "BLOCK_TOKENS": BLOCK_TOKENS,
        "MANY_TOKENS": max(MANY_TOKENS, threads),
        "COUNTS_ALONE": args.step_tokens <= MAX_COUNTED_ALONE,
        "FORWARDED": config.uses_rings,
        "COUNT_BITS": count_bits(config.max_num_inp_token_per_rank),
        "COUNT_LANES": kernels.count_lanes(threads),
        "POISON_LANES": threads,
        "PROGRAM_LANES": max(look_back // padded(config.world_size), 1),
    }
    row = row_constants(config, casts=kernels.casts(args.tokens))
    tile = _tile(_tile_tokens(kernels, args, launch), row.GROUP.value, args.tokens.dtype, threads, config.world_size)
    return {
        "ROW": row,
        "LINE": constants(Scales, scale_constants(kernels.scale_bytes(args.scales))),
        "BULK": constants(BulkDispatch, bulk),
        "TILE": tile,
    }


def _tile_tokens(kernels: OpKernels, args: Step, launch: Launch) -> int:
    """Tokens of a tile; 0, no tiles, also where a scale is a row's, which takes the registers of all warps."""
    by_rows = kernels.casts(args.tokens) and kernels.config.dispatch_quant == QuantType.FP8_PER_TOKEN
    return 0 if by_rows else launch.send_rows


def _tile(tokens: int, group: int, dtype: torch.dtype, threads: int, world_size: int) -> Tile:
    """The constants of a tile: a part of its rows is what all threads load at once, or with a cast at twice."""
    rows, lanes = max(1, tokens), padded(world_size)
    groups = max(1, threads * 2 * TILE_LOAD_BYTES // (rows * max(1, group) * dtype.itemsize))
    words = max(1, threads * TILE_LOAD_BYTES // (rows * WORD_BYTES))
    parts = CAST_PARTS if group else PLAIN_PARTS
    copies = max(1, threads // (rows * groups * parts))
    listed = max(LEAST_LISTED, min(BLOCK_TOKENS, LISTED_WORDS // lanes))
    if tokens == 1:
        listed = max(LEAST_LISTED_SOON, WARP_LANES // lanes)
    return Tile(*map(tl.constexpr, (tokens, groups, words, parts, copies, listed)))


def dispatch_values(kernels: OpKernels, args: Step, phase: Phase, launch: Launch) -> tuple[Any, ...]:
    """Run-time arguments of the kernel of a dispatch."""
    config = kernels.config
    width = config.scale_bytes if phase is Phase.LOW_LATENCY_DISPATCH else kernels.scale_bytes(args.scales)
    values = (
        *row_operands(kernels, args, width),
        args.num_tokens,
        args.step_tokens,
        args.wire_word,
        args.pad_id,
        args.row_limit,
        config.max_num_recv_tokens,
        config.rank * config.world_size * config.max_num_inp_token_per_rank,
        config.rank,
    )
    return (*values, launch.num_senders, launch.num_receivers) if phase is Phase.LOW_LATENCY_DISPATCH else values


def row_operands(kernels: OpKernels, args: Step, scale_width_bytes: int) -> tuple[torch.Tensor, ...]:
    """(tokens, scales, weights, ids, address table) as kernels take them: in words, `absent` for None."""
    casts = kernels.config.casts_in_dispatch and args.tokens.dtype != FP8_DTYPE
    tokens = args.tokens if casts else elements_of(args.tokens, torch.int32)
    scales = weights = kernels.absent
    if args.scales is not None:
        scales = elements_of(args.scales, torch.int32 if scale_width_bytes % WORD_BYTES == 0 else torch.uint8)
    if args.weights is not None:
        weights = args.weights.view(torch.int32)
    return tokens, scales, weights, args.ids, kernels.table


def receiving_launch(kernels: OpKernels, args: Step) -> Launched:
    """(kernel, run-time arguments, programs) of the receiving stage of a bulk dispatch whose rows others have placed.

    It reads no row, so one kernel serves rows of every kind.
    """
    ids, pad_id = args.ids, args.pad_id
    kernel = dispatch_kernel(kernels, Step(ids, None, None, ids, 1), Phase.BULK_DISPATCH, RECEIVING, RECEIVE)
    plain = Step(
        ids, None, None, ids, args.step_tokens, pad_id, False, 0, args.num_tokens, args.row_limit, args.wire_word
    )
    return kernel, dispatch_values(kernels, plain, Phase.BULK_DISPATCH, RECEIVING), 1


def make_plan(
    kernels: OpKernels,
    phase: Phase,
    launch: Launch,
    stages: Stages,
    kernel_of: Callable[[Stages], CompiledKernel],
    values: tuple[Any, ...],
) -> tuple[tuple[CompiledKernel, Launch, int], ...]:
    """The launches of a call that does `stages`. Kernels are compiled: the registers that they got bound the programs.

    Args:
        kernels: of the op.
        phase, launch: of the whole call, as the policy has them.
        kernel_of: the kernel of a launch that does these stages.
        values: run-time arguments like those of the call.
    """
    parts = _parts(phase, stages, is_interpreted=kernels.interpreted)
    found = [(kernel_of(part), part) for part in parts]
    if not kernels.interpreted:
        compile_all(((kernel, values) for kernel, _ in found), kernels.config)
    plan = []
    for kernel, part in found:
        fitted = fitted_launch(kernels, launch, phase, kernel)
        plan.append((kernel, fitted, _num_programs(fitted, phase, part)))
    return tuple(plan)


def _parts(phase: Phase, stages: Stages, *, is_interpreted: bool) -> tuple[Stages, ...]:
    """The interpreter, which runs programs in turn, cannot send and receive in one launch where programs wait."""
    if is_interpreted and stages == WHOLE and phase is not Phase.BULK_DISPATCH:
        return (SEND, RECEIVE)
    return (stages,)


def fitted_launch(kernels: OpKernels, launch: Launch, phase: Phase, kernel: CompiledKernel) -> Launch:
    """The launch cut down to the programs that the registers of its compiled kernel leave room for."""
    if kernel.programs_per_sm is None:
        return launch
    most = kernels.num_sms * kernel.programs_per_sm
    if 0 < kernels.max_sms < kernels.num_sms:
        most = min(most, kernels.max_sms)
    return launch if launch.num_programs <= most else fit(launch, phase, most)


def _num_programs(launch: Launch, phase: Phase, stages: Stages) -> int:
    """Programs of a launch that does these stages."""
    if stages == WHOLE:
        return launch.num_programs
    if phase is Phase.BULK_DISPATCH:
        return launch.num_programs if stages.send else 1
    return FLAG_PROGRAMS[phase] + (launch.num_senders if stages.send else launch.num_receivers)
