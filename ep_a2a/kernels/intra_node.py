"""IntraNode: the launches of one op inside a node. Checks and bookkeeping are op.py's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from ep_a2a.config import FP8_DTYPE, FP8_GROUP_SIZE, Layout, QuantType, ScaleFormat
from ep_a2a.errors import UnsupportedError
from ep_a2a.kernels.combine_kernels import combine_kernel, stage_kernel
from ep_a2a.kernels.dispatch_kernels import dispatch_kernel
from ep_a2a.kernels.layout import padded
from ep_a2a.kernels.receive_kernels import count_local_experts_kernel
from ep_a2a.policy import COMBINE_BLOCK_ELEMENTS, COMBINE_WARPS, Launch, Phase, choose_launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.kernels.portable import PortableFunction

FP8_CAPABILITY = (8, 9)
WORD_BYTES = 4
MAX_BLOCK_WORDS = 4096
BLOCK_TOKENS = 64
"""Tokens whose destinations a program works out at once."""
BLOCK_ROWS = 64
"""Received rows whose ids a program looks at at once."""
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class DispatchArguments:
    """What one dispatch launch works on; see dispatch_kernel for the shapes."""

    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor
    num_tokens: int
    max_num_tokens: int
    wire_word: int
    pad_id: int
    row_limit: int


@dataclass(frozen=True)
class CombineArguments:
    """What one combine works on.

    Attributes:
        rows: received rows' results to be staged, or None when they lie in the combine region already.
        weights: [R, K] in received-row order, or None.
        ids: ids to compare with those dispatched, or None.
        result: [num_tokens, H], where the sums go.
    """

    rows: torch.Tensor | None
    weights: torch.Tensor | None
    ids: torch.Tensor | None
    result: torch.Tensor
    num_tokens: int
    max_num_tokens: int


class IntraNodeKernels:
    """Compiles and launches the IntraNode kernels for one config.

    Args:
        config: the op's.
        table: address table on the device, int64 [regions, W].
        device: where the kernels run; CPU means Triton's interpreter.
    """

    def __init__(self, config: EpDispatchCombineConfig, table: torch.Tensor, device: torch.device) -> None:
        self.config, self.table, self.device = config, table, device
        interpreted = device.type == "cpu"
        if not interpreted and config.casts_in_dispatch and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise UnsupportedError(
                f"a GPU of compute capability {FP8_CAPABILITY} or later for the fp8 cast inside dispatch",
                f"{torch.cuda.get_device_capability(device)}", "Use quant_type='none', or cast before dispatch.",
            )  # fmt: skip
        self._device_sms = 0 if interpreted else torch.cuda.get_device_properties(device).multi_processor_count
        self.num_sms = self._device_sms
        self._world = {"WORLD_SIZE": config.world_size, "WORLD_LANES": padded(config.world_size)}
        self._topk = {"TOPK": config.topk, "TOPK_LANES": padded(config.topk)}
        self._compact = {"COMPACT": config.layout == Layout.COMPACT}

    def limit_sms(self, max_sms: int) -> None:
        """Bounds the multiprocessors of launches from now on; 0 = all."""
        self.num_sms = min(self._device_sms, max_sms) if max_sms else self._device_sms

    def dispatch(self, args: DispatchArguments, block_num: int = -1, warp_per_block: int = -1) -> None:
        """Launches one dispatch."""
        launch = choose_launch(self.config, Phase.DISPATCH, args.num_tokens, self.num_sms, block_num, warp_per_block)
        self._run(dispatch_kernel, launch, *self._dispatch_call(args))

    def combine(self, args: CombineArguments, block_num: int = -1, warp_per_block: int = -1) -> None:
        """Launches one combine: staging first when there is something to stage."""
        if args.rows is not None or args.weights is not None:
            launch = choose_launch(
                self.config, Phase.STAGE, self.config.world_size * args.max_num_tokens, self.num_sms, -1, warp_per_block
            )
            self._run(stage_kernel, launch, *self._stage_call(args))
        launch = choose_launch(self.config, Phase.COMBINE, args.num_tokens, self.num_sms, block_num, warp_per_block)
        self._run(combine_kernel, launch, *self._combine_call(args))

    def count_local_experts(self, counts: torch.Tensor, first_expert: int, max_num_tokens: int) -> None:
        """Launches the count of received rows per local expert into counts, int32 [E]."""
        launch = Launch(counts.numel(), COMBINE_WARPS, "one program per expert")
        self._run(count_local_experts_kernel, launch, *self._count_call(counts, first_expert, max_num_tokens))

    def compile(self) -> None:
        """Compiles and loads every variant that a call without own launch numbers can reach; nothing is launched.

        Each rank begins elsewhere in the list, so that ranks of one host find most variants in Triton's disk cache.
        """
        if self.device.type == "cpu":
            return
        variants = list(self.variants())
        for position in range(len(variants)):
            kernel, phase, args, constants = variants[(position + self.config.rank) % len(variants)]
            launch = choose_launch(self.config, phase, self.config.max_num_inp_token_per_rank, self.num_sms)
            compiled = kernel.warmup(*args, grid=(1,), **constants, **_options(launch))
            compiled._init_handles()

    def variants(self) -> Iterator[tuple[PortableFunction, Phase, tuple[Any, ...], dict[str, Any]]]:
        """Every (kernel, phase, run-time arguments, constants) that calls of the op can need, with stand-in tensors."""
        config = self.config
        word = torch.empty(16, dtype=torch.int32, device=self.device)
        floats = torch.empty(16, dtype=torch.float32, device=self.device)
        inputs = [torch.empty(16, dtype=config.data_type, device=self.device)]
        scale_options: list[torch.Tensor | None] = [None]
        if config.casts_in_dispatch:
            inputs.append(torch.empty(16, dtype=FP8_DTYPE, device=self.device))
        if config.num_scales:
            scale_options.append(word)
        for x in inputs:
            cast = config.casts_in_dispatch and x.dtype != FP8_DTYPE
            for scales in [None] if cast else scale_options:
                for weights in (None, floats):
                    dispatch = DispatchArguments(x, scales, weights, word, 0, 1, 1, -1, 1)
                    yield dispatch_kernel, Phase.DISPATCH, *self._dispatch_call(dispatch)
        yield count_local_experts_kernel, Phase.STAGE, *self._count_call(word, 0, 1)
        rows = torch.empty(16, dtype=config.combined_dtype, device=self.device)
        for weights in (None, floats):
            for staged in (None, rows):
                if staged is not None or weights is not None:
                    yield (
                        stage_kernel,
                        Phase.STAGE,
                        *self._stage_call(CombineArguments(staged, weights, None, rows, 0, 1)),
                    )
            for ids in (None, word):
                combine = CombineArguments(None, weights, ids, rows, 0, 1)
                yield combine_kernel, Phase.COMBINE, *self._combine_call(combine)

    def _dispatch_call(self, args: DispatchArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        config = self.config
        cast = config.casts_in_dispatch and args.x.dtype != FP8_DTYPE
        group = 0
        if cast:
            group = FP8_GROUP_SIZE if config.dispatch_quant == QuantType.FP8_PER_1X128 else config.hidden_dim
        row_words = config.hidden_dim * config.wire_dtype.itemsize // WORD_BYTES
        scale_bytes = 0 if args.scales is None else config.num_scales * config.scale_bytes
        scale_words = scale_bytes % WORD_BYTES == 0
        x = args.x if cast else args.x.view(torch.int32)
        scales = args.ids
        if args.scales is not None:
            scales = args.scales.view(torch.int32 if scale_words else torch.uint8)
        values = (
            x, scales, args.ids if args.weights is None else args.weights, args.ids, self.table,
            args.num_tokens, args.max_num_tokens, args.wire_word, args.pad_id, args.row_limit,
            config.max_num_recv_tokens, config.rank * config.world_size * config.max_num_inp_token_per_rank,
            config.rank,
        )  # fmt: skip
        scale_width = scale_bytes // WORD_BYTES if scale_words else scale_bytes
        constants = {
            **self._topk, **self._world, **self._compact,
            "NUM_EXPERTS": config.total_experts,
            "ROW_WORDS": row_words, "BLOCK_WORDS": min(padded(row_words), MAX_BLOCK_WORDS),
            "SCALE_WIDTH": scale_width, "SCALE_LANES": padded(max(1, scale_width)),
            "SCALE_DTYPE": tl.int32 if scale_words else tl.uint8,
            "GROUP": group, "GROUP_LANES": padded(max(1, group)),
            "GROUPS_LANES": padded(config.hidden_dim // group) if group else 1,
            "UE8M0": config.scale_format == ScaleFormat.UE8M0,
            "HAS_WEIGHTS": args.weights is not None, "BLOCK_TOKENS": BLOCK_TOKENS,
        }  # fmt: skip
        return values, constants

    def _count_call(
        self, counts: torch.Tensor, first_expert: int, max_num_tokens: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        constants = {**self._topk, **self._world, **self._compact, "BLOCK_ROWS": BLOCK_ROWS}
        return (self.table, self.config.rank, max_num_tokens, first_expert, counts), constants

    def _stage_call(self, args: CombineArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        row_words = self.config.hidden_dim * self.config.combined_dtype.itemsize // WORD_BYTES
        rows = self.table if args.rows is None else args.rows.view(torch.int32)
        weights = self.table if args.weights is None else args.weights
        values = (rows, weights, self.table, args.max_num_tokens, self.config.rank)
        constants = {
            "WORLD_SIZE": self.config.world_size, **self._topk, **self._compact,
            "ROW_WORDS": row_words, "BLOCK_WORDS": min(padded(row_words), MAX_BLOCK_WORDS),
            "COPY_ROWS": args.rows is not None, "HAS_WEIGHTS": args.weights is not None,
        }  # fmt: skip
        return values, constants

    def _combine_call(self, args: CombineArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = (
            args.result, self.table if args.ids is None else args.ids, self.table, args.num_tokens, self.config.rank,
        )  # fmt: skip
        constants = {
            **self._topk, **self._world,
            "HIDDEN": self.config.hidden_dim,
            "BLOCK": min(padded(self.config.hidden_dim), COMBINE_BLOCK_ELEMENTS),
            "DTYPE": TRITON_DTYPES[self.config.combined_dtype],
            "HAS_WEIGHTS": args.weights is not None, "CHECK_INDICES": args.ids is not None,
        }  # fmt: skip
        return values, constants

    def _run(self, kernel: PortableFunction, launch: Launch, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        if self.device.type == "cpu":
            kernel.interpret((launch.num_programs,), *args, **constants)
        else:
            kernel[(launch.num_programs,)](*args, **constants, **_options(launch))


def _options(launch: Launch) -> dict[str, Any]:
    # fused multiply-add would round once where the reference rounds twice
    return {"num_warps": launch.num_warps, "enable_fp_fusion": False}
