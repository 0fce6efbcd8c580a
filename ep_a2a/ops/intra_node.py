"""IntraNode: the launches of one op inside a node. Checks and bookkeeping are op.py's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from ep_a2a.config import FP8_DTYPE, CompiledCalls, Layout, QuantType
from ep_a2a.errors import UnsupportedError
from ep_a2a.kernels.bulk_dispatch_kernels import bulk_dispatch_kernel
from ep_a2a.kernels.combine_kernels import combine_kernel
from ep_a2a.kernels.compilation import compile_all
from ep_a2a.kernels.compiled_kernel import REGISTERS_PER_SM, CompiledKernel
from ep_a2a.kernels.constants import Block, BulkDispatch, Combine, Form, LowLatencyDispatch, Row, Scales, constants
from ep_a2a.kernels.layout import WORD_BYTES, count_bits, padded, side_words
from ep_a2a.kernels.ll_dispatch_kernels import ll_dispatch_kernel
from ep_a2a.kernels.receive_kernels import count_local_experts_kernel
from ep_a2a.ops.arguments import RECEIVE, SEND, WHOLE, CombineArguments, DispatchArguments, Stages, add_to_cache
from ep_a2a.ops.expert_major import ExpertMajorKernels
from ep_a2a.ops.inputs import elements_of
from ep_a2a.ops.launch_plan import LaunchPlan, make_plan
from ep_a2a.ops.row_constants import (
    MANY_TOKENS,
    MAX_BLOCK_WORDS,
    ResultRows,
    placement_of,
    row_constants,
    scale_line,
    shape_of,
)
from ep_a2a.ops.warmup_args import warmup_combines, warmup_dispatches
from ep_a2a.tuning.policy import (
    COUNT_WARPS,
    MAX_COUNTED_ALONE,
    Launch,
    Phase,
    choose_launch,
    dispatch_phase,
    launch_shapes,
)
from ep_a2a.tuning.tables import TunedTables, arch_name, load_tables

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.launch_plan import Launches, ValuesOf, VariantOf

FP8_CAPABILITY = (8, 9)
DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
BLOCK_TOKENS = 64
"""Tokens whose destinations a program works out at once, where it counts its own."""
BLOCK_ROWS = 64
"""Received rows whose ids a program looks at at once."""
LL_PROGRAMS_PER_SM = 2
"""Programs of a low-latency dispatch that a multiprocessor must hold, at the price of some registers."""
LOOK_BACK_LANES = 2048
"""Words that a program reads at once to learn how many rows the programs before it send."""


class IntraNodeKernels:
    """Compiles and launches the IntraNode kernels for one config.

    Args:
        config: the op's.
        table: address table on the device, int64 [regions, W].
        device: where the kernels run; CPU means Triton's interpreter.
    """

    sends_late = False
    """Whether the second half of a dispatch reads what the first was given."""

    def __init__(self, config: EpDispatchCombineConfig, table: torch.Tensor, device: torch.device) -> None:
        self.config, self.table, self.device = config, table, device
        self._interpreted = device.type == "cpu"
        self._capability = (0, 0) if self._interpreted else torch.cuda.get_device_capability(device)
        casts = config.casts_in_dispatch or config.combine_quant != QuantType.NONE
        if not self._interpreted and casts and self._capability < FP8_CAPABILITY:
            raise UnsupportedError(
                f"a GPU of compute capability {FP8_CAPABILITY} or later for casts to fp8",
                str(self._capability),
                "Use quant_type='none', or cast before dispatch.",
            )
        self.num_sms = 0 if self._interpreted else torch.cuda.get_device_properties(device).multi_processor_count
        self.max_sms, self._most_sms = config.max_sms, {"config": config.max_sms}
        self._op_shape, self._placement = shape_of(config), placement_of(config)
        self._results = ResultRows.of(config)
        self._can_depend = self._capability >= DEPENDENT_LAUNCH_CAPABILITY
        self._tables: TunedTables | None = None
        self._compiled_stages: tuple[Stages, ...] = (WHOLE,)
        self._launch_plans: dict[Hashable, tuple[Phase, LaunchPlan]] = {}
        self._variants: dict[tuple[Any, ...], CompiledKernel] = {}
        self._spans = False
        self._count = CompiledKernel(
            count_local_experts_kernel, {"S": self._op_shape, "BLOCK_ROWS": BLOCK_ROWS}, COUNT_WARPS
        )
        self._by_expert: ExpertMajorKernels | None = None
        if config.layout == Layout.EXPERT_MAJOR:
            self._by_expert = ExpertMajorKernels(config, table, device)

    def limit_sms(self, max_sms: int, whose: str = "caller") -> None:
        """Bounds the multiprocessors of launches from now on; the least of all bounds counts, 0 = none of this name."""
        self._most_sms[whose] = max_sms
        self.max_sms = min(filter(None, self._most_sms.values()), default=0)
        self._launch_plans.clear()
        if self._variants:
            self.compile()

    @property
    def num_channel_programs(self) -> int:
        """Programs that exchange chunks with other nodes, of a launch of their own: none."""
        return 0

    def use_tables(self, tables: TunedTables) -> None:
        """Looks launch numbers up in these tables from now on; `compile` then compiles what they can give."""
        self._tables = tables
        self._launch_plans.clear()

    def launch_of(
        self, phase: Phase, num_tokens: int, max_num_tokens: int, block_num: int = -1, warp_per_block: int = -1
    ) -> Launch:
        """Launch numbers of a call."""
        launch = choose_launch(
            self.config,
            phase,
            num_tokens,
            max_num_tokens,
            self.num_sms,
            block_num,
            warp_per_block,
            self._tables,
            self.max_sms,
        )
        if self._tables is not None:
            self._tables.log_source(self.config, phase.value, max_num_tokens, launch.reason)
        return launch

    def full_sized_launch(self, is_dispatch: bool, block_num: int, warp_per_block: int) -> tuple[int, int, int]:
        """(programs, those of channels, warps per program) of a call with as many tokens as there may be."""
        tokens = self.config.max_num_inp_token_per_rank
        phase = self.dispatch_phase(tokens) if is_dispatch else Phase.COMBINE
        launch = self.launch_of(phase, tokens, tokens, block_num, warp_per_block)
        return launch.num_programs, self.num_channel_programs, launch.num_warps

    def dispatch_phase(self, max_num_tokens: int) -> Phase:
        """Returns the kind of a step's dispatch; the same on all ranks, since all agree on max_num_tokens."""
        return dispatch_phase(self.config, max_num_tokens)

    def dispatch(
        self, args: DispatchArguments, block_num: int = -1, warp_per_block: int = -1, stages: Stages = WHOLE
    ) -> None:
        """Launches one dispatch, or one of its halves."""
        for variant, values, num_programs in self._dispatch_launches(args, stages, block_num, warp_per_block):
            variant.run(num_programs, values, self.device)
        if self._by_expert is not None and stages.receive:
            has_scales = args.scales is not None or self.config.casts_in_dispatch
            self._by_expert.expand(args.max_num_tokens, has_scales, self.num_sms, self.max_sms)

    def combine(
        self, args: CombineArguments, block_num: int = -1, warp_per_block: int = -1, stages: Stages = WHOLE
    ) -> None:
        """Launches one combine, or one of its halves."""
        for target, source in args.copies if stages.send else ():
            target.copy_(source)
        if self._by_expert is not None and args.expert_rows is not None and stages.send:
            self._by_expert.reduce(args.expert_rows, args.max_num_tokens, self.num_sms, self.max_sms)
        for variant, values, num_programs in self._combine_launches(args, stages, block_num, warp_per_block):
            variant.run(num_programs, values, self.device)

    def _dispatch_launches(
        self, args: DispatchArguments, stages: Stages, block_num: int, warp_per_block: int
    ) -> Launches:
        """(kernel, run-time arguments, programs) of a dispatch, in order."""
        key = (
            args.num_tokens,
            args.max_num_tokens,
            args.x.dtype,
            args.scales is None,
            args.weights is None,
            stages,
            block_num,
            warp_per_block,
        )
        found = self._launch_plans.get(key)
        if found is None:
            phase = self.dispatch_phase(args.max_num_tokens)
            found = self._make_plan(
                key,
                phase,
                args,
                stages,
                block_num,
                warp_per_block,
                lambda launch, part: self._dispatch_variant(args, phase, launch, part),
                lambda launch: self._dispatch_values(args, phase, launch),
            )
        phase, plan = found
        for variant, launch, num_programs in plan:
            yield variant, self._dispatch_values(args, phase, launch), num_programs

    def _combine_launches(
        self, args: CombineArguments, stages: Stages, block_num: int, warp_per_block: int
    ) -> Launches:
        key = (
            Phase.COMBINE,
            args.num_tokens,
            args.max_num_tokens,
            args.weights is None,
            args.ids is None,
            args.biases[0] is None,
            args.biases[1] is None,
            stages,
            block_num,
            warp_per_block,
        )
        found = self._launch_plans.get(key)
        if found is None:
            found = self._make_plan(
                key,
                Phase.COMBINE,
                args,
                stages,
                block_num,
                warp_per_block,
                lambda launch, part: self._combine_variant(args, launch, part, in_place=stages == WHOLE),
                lambda launch: self._combine_values(args, launch),
            )
        for variant, launch, num_programs in found[1]:
            yield variant, self._combine_values(args, launch), num_programs

    def _make_plan(
        self,
        key: Hashable,
        phase: Phase,
        args: DispatchArguments | CombineArguments,
        stages: Stages,
        block_num: int,
        warp_per_block: int,
        variant_of: VariantOf,
        values_of: ValuesOf,
    ) -> tuple[Phase, LaunchPlan]:
        """Makes and keeps the launches of all calls with this key."""
        launch = self.launch_of(phase, args.num_tokens, args.max_num_tokens, block_num, warp_per_block)
        sizes = self.num_sms, self.max_sms
        plan = make_plan(self.config, phase, launch, stages, variant_of, values_of, *sizes, self._interpreted)
        return add_to_cache(self._launch_plans, key, (phase, plan))

    def count_local_experts(self, counts: torch.Tensor, max_num_tokens: int) -> None:
        """Launches the count of received rows per local expert into counts, int32 [E]."""
        values = (self.table, self.config.rank, max_num_tokens, self.config.first_expert, counts)
        self._count.run(counts.numel(), values, self.device)

    def compile(self) -> None:
        """Compiles and loads every variant that whole dispatches and combines without own launch numbers can reach.

        Nothing is launched. Split calls are compiled when they are first used, or by warmup_split.
        Each rank begins elsewhere in the list, so that ranks of one host find most variants in Triton's disk cache.
        """
        if self._interpreted:
            return
        if self._tables is None:
            # here, because the other ranks learn of an error in this method
            self.use_tables(load_tables(arch_name(self._capability), self.config.world_size))
        variants = [each for stages in self._compiled_stages for each in self.variants(stages)]
        first = self.config.rank % len(variants)
        compile_all(variants[first:] + variants[:first], self.config)

    def quiet(self) -> None:
        """Launches what ends when all that was sent is where it belongs: nothing, where kernels store it themselves."""

    def record_spans(self) -> None:
        """Takes kernels that note when their programs begin and end what they do, from now on."""
        self._spans = True
        self._launch_plans.clear()
        if self._by_expert is not None:
            self._by_expert = ExpertMajorKernels(self.config, self.table, self.device, spans=True)
        self.compile()

    def warmup_split(self) -> None:
        """Compiles what the split calls need, now and whenever `compile` is called."""
        self._compiled_stages = (WHOLE, SEND, RECEIVE)
        self.compile()

    def variants(self, stages: Stages = WHOLE) -> list[tuple[CompiledKernel, tuple[Any, ...]]]:
        """Every (variant, run-time arguments) that such calls of the op can need, with stand-in tensors."""
        # several shapes of launches have one variant where the device knows no dependent launch
        found = (*self._reachable(stages), *self._other_variants())
        return list({id(variant): (variant, values) for variant, values in found}.values())

    def _reachable(self, stages: Stages) -> Iterator[tuple[CompiledKernel, tuple[Any, ...]]]:
        shapes = launch_shapes(self.config, self.num_sms, self._tables, self.max_sms)
        dispatches = list(warmup_dispatches(self.config, self.device))
        combines = list(warmup_combines(self.config, self.device))
        for phase, tokens, launch in shapes:
            for args in dispatches if phase is not Phase.COMBINE else ():
                sized = args._replace(max_num_tokens=tokens)
                variant = self._dispatch_variant(sized, phase, launch, stages)
                yield variant, self._dispatch_values(sized, phase, launch)
        for phase, tokens, launch in shapes:
            for combine in combines if phase is Phase.COMBINE else ():
                back = combine._replace(max_num_tokens=tokens)
                variant = self._combine_variant(back, launch, stages, in_place=stages == WHOLE)
                yield variant, self._combine_values(back, launch)

    def _other_variants(self) -> Iterator[tuple[CompiledKernel, tuple[Any, ...]]]:
        if self.config.compiled_calls != CompiledCalls.SERVING:
            yield self._count, (self.table, 0, 1, 0, torch.empty(16, dtype=torch.int32, device=self.device))
        if self._by_expert is not None:
            yield from self._by_expert.variants()

    def _casts(self, x: torch.Tensor) -> bool:
        return self.config.casts_in_dispatch and x.dtype != FP8_DTYPE

    def _scale_bytes(self, scales: torch.Tensor | None) -> int:
        return 0 if scales is None else self.config.num_scales * self.config.scale_bytes

    def _dispatch_variant(
        self, args: DispatchArguments, phase: Phase, launch: Launch, stages: Stages
    ) -> CompiledKernel:
        dependent = launch.dependent and self._can_depend
        counted_alone = args.max_num_tokens <= MAX_COUNTED_ALONE
        key = (
            phase,
            args.x.dtype,
            args.scales is None,
            args.weights is None,
            launch.num_warps,
            launch.sparse_polls,
            dependent,
            counted_alone,
            stages,
            self._spans,
        )
        variant = self._variants.get(key)
        if variant is None:
            kernel = bulk_dispatch_kernel if phase is Phase.DISPATCH else ll_dispatch_kernel
            given = self._dispatch_constants(args, phase, launch, stages)
            threads = LL_PROGRAMS_PER_SM * 32 * launch.num_warps
            max_registers = REGISTERS_PER_SM // threads if phase is Phase.LL_DISPATCH else None
            variant = self._variants[key] = CompiledKernel(kernel, given, launch.num_warps, max_registers)
        return variant

    def _dispatch_constants(
        self, args: DispatchArguments, phase: Phase, launch: Launch, stages: Stages
    ) -> dict[str, Any]:
        config, cast, threads = self.config, self._casts(args.x), 32 * launch.num_warps
        row = row_constants(config, casts=cast)
        block_words = min(padded(row["ROW_WORDS"]), MAX_BLOCK_WORDS)
        count_lanes = max(padded(config.world_size * (config.world_size + 1)), threads)
        dependent = launch.dependent and self._can_depend
        common = {
            "S": self._op_shape,
            "OWNERS": self._placement,
            "FORM": self._form(stages, has_weights=args.weights is not None, is_dependent=dependent),
        }
        if phase is Phase.LL_DISPATCH:
            return common | {
                "ROW": constants(Row, row | {"BLOCK_WORDS": max(block_words, threads)}),
                "LL": constants(
                    LowLatencyDispatch,
                    {
                        "SLOTS": config.flagged_tokens,
                        "TOKEN_LANES": padded(config.flagged_tokens),
                        "COUNT_BITS": count_bits(config.flagged_tokens),
                        "SCALE_WORDS": config.num_scales,
                        "HAS_SCALES": cast or args.scales is not None,
                        "COUNT_LANES": count_lanes,
                        "SIDE_LANES": max(padded(side_words(config) + 1), threads),
                        "SPARSE_POLLS": launch.sparse_polls,
                    },
                ),
            }
        return common | {
            "ROW": constants(Row, row | {"BLOCK_WORDS": block_words}),
            "LINE": constants(Scales, scale_line(self._scale_bytes(args.scales))),
            "BULK": constants(
                BulkDispatch,
                {
                    "BLOCK_TOKENS": BLOCK_TOKENS,
                    "MANY_TOKENS": max(MANY_TOKENS, threads),
                    "COUNTS_ALONE": args.max_num_tokens <= MAX_COUNTED_ALONE,
                    "FORWARDED": config.uses_rings,
                    "COUNT_BITS": count_bits(config.max_num_inp_token_per_rank),
                    "COUNT_LANES": count_lanes,
                    "POISON_LANES": threads,
                    "PROGRAM_LANES": max(LOOK_BACK_LANES // padded(config.world_size), 1),
                },
            ),
        }

    def _form(self, stages: Stages, *, has_weights: bool, is_dependent: bool) -> Form:
        return Form(*map(tl.constexpr, (*stages, has_weights, is_dependent, self._spans)))

    def _dispatch_tensors(self, args: DispatchArguments, scale_width_bytes: int) -> tuple[torch.Tensor, ...]:
        """(x, scales, weights, ids, table) as kernels take them."""
        x = args.x if self._casts(args.x) else elements_of(args.x, torch.int32)
        scales, weights = args.ids, args.ids
        if args.scales is not None:
            scales = elements_of(args.scales, torch.int32 if scale_width_bytes % WORD_BYTES == 0 else torch.uint8)
        if args.weights is not None:
            weights = args.weights.view(torch.int32)
        return x, scales, weights, args.ids, self.table

    def _dispatch_values(self, args: DispatchArguments, phase: Phase, launch: Launch) -> tuple[Any, ...]:
        config = self.config
        width = config.scale_bytes if phase is Phase.LL_DISPATCH else self._scale_bytes(args.scales)
        values = (
            *self._dispatch_tensors(args, width),
            args.num_tokens,
            args.max_num_tokens,
            args.wire_word,
            args.pad_id,
            args.row_limit,
            config.max_num_recv_tokens,
            config.rank * config.world_size * config.max_num_inp_token_per_rank,
            config.rank,
        )
        return (*values, launch.num_senders, launch.num_receivers) if phase is Phase.LL_DISPATCH else values

    def _combine_variant(
        self, args: CombineArguments, launch: Launch, stages: Stages, *, in_place: bool
    ) -> CompiledKernel:
        key = (
            Phase.COMBINE,
            args.weights is None,
            args.ids is None,
            args.biases[0] is None,
            args.biases[1] is None,
            launch.num_warps,
            launch.send_elements,
            launch.add_elements,
            launch.read_ahead,
            launch.dependent,
            stages,
            in_place,
            self._spans,
        )
        variant = self._variants.get(key)
        if variant is None:
            given = self._combine_constants(args, launch, stages, in_place)
            variant = self._variants[key] = CompiledKernel(combine_kernel, given, launch.num_warps)
        return variant

    def _combine_constants(
        self, args: CombineArguments, launch: Launch, stages: Stages, in_place: bool
    ) -> dict[str, Any]:
        config, results, num_warps = self.config, self._results, launch.num_warps
        # weights [., TOPK] move as blocks of one group
        weight_block = (config.topk, 1, max(padded(config.topk), 32 * num_warps), tl.int32, tl.float32, False, False)
        dependent = launch.dependent and self._can_depend
        return {
            "S": self._op_shape,
            "SENT": results.block(config.hidden_dim, launch.send_elements, num_warps),
            "ADDED": results.block(config.hidden_dim, launch.add_elements, num_warps),
            "WEIGHTS": Block(*map(tl.constexpr, weight_block)),
            "COMBINE": constants(
                Combine,
                {
                    "DTYPE": results.dtype,
                    "CHECK_INDICES": args.ids is not None,
                    "OWN_IN_PLACE": in_place and not results.quantized,
                    "READ_AHEAD": launch.read_ahead,
                },
            ),
            "FORM": self._form(stages, has_weights=args.weights is not None, is_dependent=dependent),
        }

    def _result_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of results as kernels take them: as integers, unless they cast them."""
        return rows if self._results.quantized else elements_of(rows, self._results.integers)

    def _combine_values(self, args: CombineArguments, launch: Launch) -> tuple[Any, ...]:
        config = self.config
        return (
            self._result_rows(args.rows),
            self.table if args.weights is None else args.weights.view(torch.int32),
            args.result,
            self.table if args.ids is None else args.ids,
            *args.biases,
            self.table,
            args.num_tokens,
            args.max_num_tokens,
            config.max_num_inp_token_per_rank,
            config.rank,
            launch.num_senders,
            launch.num_receivers,
            launch.pause_ns,
        )
