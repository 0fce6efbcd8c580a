"""IntraNode: an engine whose kernels store straight into the memory of all ranks.

Engines between nodes end a dispatch by the same receiving stage (`receiving_launch`).
"""

from collections.abc import Iterable, Iterator

import torch
import triton.language as tl

from ep_a2a.config import EpDispatchCombineConfig, QuantType
from ep_a2a.kernels.bulk_dispatch_kernels import bulk_dispatch_kernel
from ep_a2a.kernels.combine_kernels import combine_kernel
from ep_a2a.kernels.compiled_kernel import REGISTER_GRANULARITY, CompiledKernel
from ep_a2a.kernels.constants import Block, BulkDispatch, Combine, LowLatencyDispatch, Tile
from ep_a2a.kernels.layout import WORD_BYTES, padded, side_words
from ep_a2a.kernels.ll_dispatch_kernels import ll_dispatch_kernel
from ep_a2a.kernels.target import REGISTERS_PER_SM
from ep_a2a.ops.arguments import RECEIVE, SEND, WHOLE, LaunchWish, Stages
from ep_a2a.ops.bounds import Bounds
from ep_a2a.ops.engine import Engine
from ep_a2a.ops.launches import (
    CombineForm,
    DispatchForm,
    KernelLaunch,
    Operands,
    combine_operands,
    dispatch_operands,
    receiving_operands,
)
from ep_a2a.ops.op_kernels import OpKernels
from ep_a2a.ops.row_constants import counted_tokens, row_constants, scale_constants
from ep_a2a.ops.wire_word import bound_mask
from ep_a2a.policy import (
    BLOCK_ELEMENTS,
    DISPATCH_WARPS,
    FLAG_PROGRAMS,
    MAX_COUNTED_ALONE,
    SHARED_REGISTERS,
    THREADS_PER_SM,
    Launch,
    Phase,
    adds_arrived,
    choose_launch,
    dispatch_phase,
    fit,
    step_sizes,
)

BLOCK_TOKENS = 64
"""Tokens whose destinations a program works out at once, where it counts its own. Other numbers were not timed."""
ROW_LOAD_WORDS = 16
"""Words of a row that a thread loads at once, where tokens are sent one by one. Other numbers were not timed."""
TILE_LOAD_BYTES = 16
"""Bytes that a thread loads at once of a tile's rows: its widest load (compute capability 9.0)."""
CAST_PARTS, PLAIN_PARTS = 2, 4
"""Parts of a tile's rows under way at once, with a cast and without: 64 bytes a thread either way. Other numbers were
not timed in this kernel. A plain copy of rows of 7168 bytes by 8 programs of 16 warps moved 17.1, 27.8 and 42.7 GB/s a
program with 1, 2 and 4 rows under way, 14 bytes of each a thread (one H200, 23 November)."""
LISTED_WORDS, LEAST_LISTED = 1024, 16
"""Pairs of a token and a rank that a program works out at once, where it lists destinations: two for each of 512
threads. And the fewest tokens. Other numbers were not timed."""
LL_PROGRAMS_PER_SM = 2
"""Programs of a low-latency dispatch that must fit on a multiprocessor at once, so one of 8 warps has at most 128
registers a thread. One of 16 warps has the multiprocessor to itself: if two of those had to fit, the compiler would
put 120 bytes of a thread on the stack (8 ranks, Triton 3.9, compute capability 9.0). Other numbers were not timed."""
THREADS_BESIDE_DISPATCH = {4: 512, 8: 384}
"""Threads of a combine of few tokens that must fit on a multiprocessor beside one program of the dispatch before it,
since the combine may start before that has ended. The dispatch's program holds half of the registers, so 512 threads
have 64 each and 384 have 80. With these the compiler puts nothing on the stack (Triton 3.6, compute capability 9.0).

A key is the largest product of ranks and bytes of an element for which its value holds: 4 for 2 ranks with bf16, 8 for
4 ranks. Where ranks may be masked, which takes registers, twice the product counts. With larger products so few
registers would not do without the stack, and no room is asked for.

A round trip of 32 tokens on 2 H200s took 9.2 µs when a thread had 56 registers, 9.7 after changes that gave it 72 (27
November), and 9.6 with 64 (another call, 28 November). 4 ranks were not timed with other numbers."""
FLOAT32_THREADS = 512
"""Threads of a combine of float32 that must fit on a multiprocessor. With registers for as many as of other dtypes the
compiler would put up to 88 bytes of a thread on the stack (8 ranks, Triton 3.9, compute capability 9.0)."""
LOOK_BACK_LANES, SHARED_LOOK_BACK_LANES = 2048, 512
"""Words that a program reads at once to learn how many rows the programs before it send: 8 for each of 256 threads.
And where it shares a multiprocessor with a product: 4 for each of 128. Other numbers were not timed."""
RECEIVING = Launch(1, DISPATCH_WARPS)
NO_PAUSE_NS = 0
"""How long a program of a combine sleeps between two looks at a row that has not arrived: not at all. A pause of 200
ns changed nothing: 280.0 µs in place of 276.4, 306.6 in place of 306.8, 281.2 in place of 282.7 (three launches of a
combine of 4096 tokens that casts, 4 H200s, 27 November). The kernel keeps this argument, since without it the compiler
takes one or two registers more."""


class IntraNodeEngine(Engine):
    """Launches one kernel per call, in the interpreter one per half.

    Args:
        config: the op's.
        table: address table on the device, int64 [regions, W].
        device: where the kernels run; CPU means Triton's interpreter.
    """

    recv_reads_inputs = False

    def __init__(self, config: EpDispatchCombineConfig, table: torch.Tensor, device: torch.device) -> None:
        self.kernels = OpKernels(config, table, device)

    def _dispatch_launches(self, form: DispatchForm, stages: Stages, wish: LaunchWish) -> Iterator[KernelLaunch]:
        kernels = self.kernels
        phase = dispatch_phase(kernels.config, form.bounds.most)
        launch = self._launch_of(phase, form.num_tokens, form.bounds.most, wish)
        describe = low_latency_launch if phase is Phase.LOW_LATENCY_DISPATCH else bulk_launch
        for part in _parts(phase, stages, is_interpreted=kernels.num_sms == 0):
            yield describe(kernels, form, part, launch)

    def _combine_launches(self, form: CombineForm, stages: Stages, wish: LaunchWish) -> Iterator[KernelLaunch]:
        kernels = self.kernels
        launch = self._launch_of(Phase.COMBINE, form.num_tokens, form.bounds.most, wish)
        for part in _parts(Phase.COMBINE, stages, is_interpreted=kernels.num_sms == 0):
            yield combine_launch(kernels, form, part, launch, in_place=stages == WHOLE)

    def _launch_of(self, phase: Phase, num_tokens: int, step_tokens: int, wish: LaunchWish) -> Launch:
        """Launch numbers of a call."""
        config, num_sms, (max_sms, shares_sm) = self.kernels.config, self.kernels.num_sms, self.kernels.bound
        return choose_launch(config, phase, num_tokens, step_tokens, num_sms, *wish, max_sms, shares_sm=shares_sm)

    def full_sized_launch(self, is_dispatch: bool, wish: LaunchWish) -> tuple[int, int, int]:
        """(programs, 0 that exchange chunks between nodes, warps per program) of a call with M tokens."""
        config, tokens = self.kernels.config, self.kernels.config.max_num_inp_token_per_rank
        phase = dispatch_phase(config, tokens) if is_dispatch else Phase.COMBINE
        launch = self._launch_of(phase, tokens, tokens, wish)
        return launch.num_programs, 0, launch.num_warps

    def _sizes(self) -> Iterable[int]:
        return step_sizes(self.kernels.config)


def low_latency_launch(kernels: OpKernels, form: DispatchForm, stages: Stages, launch: Launch) -> KernelLaunch:
    """The launch of a low-latency dispatch, or of one of its halves."""
    config, casts, threads = kernels.config, form.casts(kernels.config), 32 * launch.num_warps
    low_latency = LowLatencyDispatch(
        SLOTS=config.low_latency_tokens,
        TOKEN_LANES=padded(config.low_latency_tokens),
        SCALE_WORDS=config.num_scales,
        HAS_SCALES=config.num_scales > 0 and (casts or form.has_scales),
        COUNT_LANES=kernels.count_lanes(threads),
        POISON_LANES=threads,
        SIDE_LANES=max(padded(side_words(config) + 1), threads),
        SPARSE_POLLS=launch.sparse_polls,
    )
    # a program of THREADS_PER_SM threads or more has a multiprocessor to itself
    num_programs = min(LL_PROGRAMS_PER_SM, max(1, THREADS_PER_SM[Phase.LOW_LATENCY_DISPATCH] // threads))
    row = kernels.launch(
        ll_dispatch_kernel,
        dispatch_operands,
        form.read_as(config, config.scale_bytes),
        {
            "S": kernels.shape,
            "OWNERS": kernels.placement,
            "ROW": row_constants(config, casts=casts, least_words=threads),
            "LL": low_latency,
            "FORM": kernels.form(stages, has_weights=form.has_weights),
        },
        launch.num_warps,
        max_registers=REGISTERS_PER_SM // (num_programs * threads),
    )
    fitted = fitted_launch(kernels, launch, Phase.LOW_LATENCY_DISPATCH, row.kernel)
    numbers = *_bounds_of_rows(config, form), fitted.num_senders, fitted.num_receivers
    return row._replace(numbers=numbers, num_programs=_num_programs(fitted, Phase.LOW_LATENCY_DISPATCH, stages))


def bulk_launch(kernels: OpKernels, form: DispatchForm, stages: Stages, launch: Launch) -> KernelLaunch:
    """The launch of a bulk dispatch, or of one of its halves."""
    row = _bulk_row(kernels, form, stages, launch, dispatch_operands)
    fitted = fitted_launch(kernels, launch, Phase.BULK_DISPATCH, row.kernel)
    num_programs = _num_programs(fitted, Phase.BULK_DISPATCH, stages)
    return row._replace(numbers=_bounds_of_rows(kernels.config, form), num_programs=num_programs)


def receiving_launch(kernels: OpKernels, form: DispatchForm) -> KernelLaunch:
    """The receiving stage of a bulk dispatch whose rows others have placed.

    It reads no row, so one kernel serves calls of every form.
    """
    plain = DispatchForm(torch.int32, has_scales=False, has_weights=False, num_tokens=0, bounds=Bounds())
    row = _bulk_row(kernels, plain, RECEIVE, RECEIVING, receiving_operands)
    return row._replace(numbers=_bounds_of_rows(kernels.config, form))


def _bulk_row(
    kernels: OpKernels, form: DispatchForm, stages: Stages, launch: Launch, operands: Operands
) -> KernelLaunch:
    config, threads = kernels.config, 32 * launch.num_warps
    look_back = SHARED_LOOK_BACK_LANES if launch.shares_sm else LOOK_BACK_LANES
    casts, many_tokens = form.casts(config), counted_tokens(config.world_size, threads)
    row = row_constants(config, casts=casts, most_words=ROW_LOAD_WORDS * threads)
    num_bytes = config.num_scales * config.scale_bytes if casts else form.scale_bytes(config)
    bulk = BulkDispatch(
        BLOCK_TOKENS=min(BLOCK_TOKENS, many_tokens),
        MANY_TOKENS=many_tokens,
        COUNTS_ALONE=form.bounds.most <= MAX_COUNTED_ALONE,
        FORWARDED=config.uses_rings,
        COUNT_LANES=kernels.count_lanes(threads),
        POISON_LANES=threads,
        PROGRAM_LANES=max(look_back // padded(config.world_size), 1),
        RECEIVES_ALONE=launch.send_rows == 1 and not launch.shares_sm,
    )
    registers = REGISTERS_PER_SM // max(threads, THREADS_PER_SM[Phase.BULK_DISPATCH])
    if launch.shares_sm:
        registers = SHARED_REGISTERS
    # a scale of a whole row takes the registers of all warps: no tiles
    by_rows = casts and config.dispatch_quant == QuantType.FP8_PER_TOKEN
    return kernels.launch(
        bulk_dispatch_kernel,
        operands,
        form.read_as(config),
        {
            "S": kernels.shape,
            "OWNERS": kernels.placement,
            "ROW": row,
            # scales that the cast computes are stored one by one
            "LINE": scale_constants(num_bytes, by_bytes=casts and config.scale_bytes == 1),
            "BULK": bulk,
            "TILE": _tile(1 if by_rows else launch.send_rows, row.GROUP, form.dtype, threads, config.world_size),
            "FORM": kernels.form(stages, has_weights=form.has_weights),
        },
        launch.num_warps,
        max_registers=registers,
        shares_sm=launch.shares_sm,
    )


def _bounds_of_rows(config: EpDispatchCombineConfig, form: DispatchForm) -> tuple[int, ...]:
    """Of a dispatch kernel: from row_limit to rank, as DispatchStep has them."""
    max_tokens, bounds = config.max_num_inp_token_per_rank, form.bounds
    rows = bounds.num_rows, bounds.first_row, bound_mask(max_tokens), config.max_num_recv_tokens
    return *rows, config.rank * config.world_size * max_tokens, config.rank


def combine_launch(
    kernels: OpKernels, form: CombineForm, stages: Stages, launch: Launch, *, in_place: bool
) -> KernelLaunch:
    """The launch of a combine, or of one of its halves. in_place: this rank's own rows may be added where they lie."""
    num_warps, config, results = launch.num_warps, kernels.config, kernels.results
    # before its cast a row takes twice the registers, which programs of few tokens lack
    in_place = in_place and (launch.read_ahead or not results.quantized)
    # weights [., TOPK] move as blocks of one group
    lanes = max(padded(config.topk), 32 * num_warps)
    row = kernels.launch(
        combine_kernel,
        combine_operands,
        form.read_as(config),
        {
            "S": kernels.shape,
            "SENT": results.block(config.hidden_dim, launch.send_elements, num_warps, launch.send_rows),
            "ADDED": results.block(config.hidden_dim, launch.add_elements, num_warps, adds=True),
            "WEIGHTS": Block(config.topk, lanes, 1, tl.int32, tl.float32, QUANTIZED=False, SCALED=False, ROWS=1),
            "COMBINE": Combine(results.dtype, form.has_ids, in_place, launch.read_ahead, not adds_arrived(config)),
            "FORM": kernels.form(stages, has_weights=form.has_weights),
        },
        num_warps,
        max_registers=_combine_registers(launch, config),
        shares_sm=launch.shares_sm,
    )
    fitted = fitted_launch(kernels, launch, Phase.COMBINE, row.kernel)
    sizes = form.num_tokens, form.bounds.step_tokens, config.max_num_inp_token_per_rank, config.rank
    numbers = *sizes, fitted.num_receivers, NO_PAUSE_NS
    return row._replace(numbers=numbers, num_programs=_num_programs(fitted, Phase.COMBINE, stages))


def _combine_registers(launch: Launch, config: EpDispatchCombineConfig) -> int:
    """The most registers per thread with which as many programs fit as the policy asks for.

    Left to itself the compiler spills some in order to fit one program more. Programs of few tokens find some room
    beside those of their dispatch, of which one holds half of a multiprocessor's registers.

    Args:
        launch: of the combine. config: the op's.
    """
    if launch.shares_sm:
        return SHARED_REGISTERS
    threads = 32 * launch.num_warps
    most_threads = FLOAT32_THREADS if config.combined_dtype.itemsize > 2 else THREADS_PER_SM[Phase.COMBINE]
    registers = REGISTERS_PER_SM // (max(1, most_threads // threads) * threads)
    if launch.send_elements == BLOCK_ELEMENTS and not launch.read_ahead:
        taken = config.world_size * config.combined_dtype.itemsize * (2 if config.masks else 1)
        beside = next((room for most, room in THREADS_BESIDE_DISPATCH.items() if taken <= most), 1)
        registers = min(registers, REGISTERS_PER_SM // LL_PROGRAMS_PER_SM // beside)
    return registers // REGISTER_GRANULARITY * REGISTER_GRANULARITY


def _tile(tokens: int, group: int, dtype: torch.dtype, threads: int, world_size: int) -> Tile:
    """The constants of a tile: a part of its rows is what all threads load at once, or with a cast at twice."""
    groups = max(1, threads * 2 * TILE_LOAD_BYTES // (tokens * max(1, group) * dtype.itemsize))
    words = max(1, threads * TILE_LOAD_BYTES // (tokens * WORD_BYTES))
    parts = CAST_PARTS if group else PLAIN_PARTS
    copies = max(1, threads // (tokens * groups * parts))
    listed = max(LEAST_LISTED, min(BLOCK_TOKENS, LISTED_WORDS // padded(world_size)))
    return Tile(tokens, groups, words, parts, copies, listed)


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
    if stages == WHOLE or launch.by_all:
        return launch.num_programs
    if phase is Phase.BULK_DISPATCH:
        return launch.num_programs if stages.send else 1
    return FLAG_PROGRAMS[phase] + (launch.num_senders if stages.send else launch.num_receivers)
