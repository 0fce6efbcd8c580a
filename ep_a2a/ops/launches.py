"""Rows of an engine's tables: one launch each, with its kernel, constants, operands and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ep_a2a.config import FP8_DTYPE, CompiledCalls, EpDispatchCombineConfig, Layout, QuantType
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.layout import WORD_BYTES
from ep_a2a.ops.arguments import CombineArguments, Step
from ep_a2a.ops.bounds import Bounds

TABLE: Any = torch.int64
"""The address table, among operands that stand for tensors by their dtypes."""
Operands = Callable[[Any, Any], tuple[Any, ...]]
"""Of a call's arguments and the address table, the run-time arguments of a kernel that differ between calls."""


class KernelLaunch(NamedTuple):
    """One launch of calls of one form.

    Attributes:
        kernel: the compiled kernel; all launches of its description share it.
        operands: its first run-time arguments.
        numbers: the run-time arguments behind them.
        num_programs: programs of the grid.
    """

    kernel: CompiledKernel
    operands: Operands
    numbers: tuple[int, ...]
    num_programs: int


class DispatchForm(NamedTuple):
    """What the launches of a dispatch depend on, beside the op; calls of one form share their launches.

    Attributes:
        dtype: of the tokens.
        has_scales, has_weights: whether the call brings them.
        num_tokens: T.
        bounds: the step's.
    """

    dtype: torch.dtype
    has_scales: bool
    has_weights: bool
    num_tokens: int
    bounds: Bounds

    @classmethod
    def of(cls, args: Step) -> DispatchForm:
        """The form of a call."""
        has_scales, has_weights = args.scales is not None, args.weights is not None
        return cls(args.tokens.dtype, has_scales, has_weights, args.num_tokens, args.bounds)

    def casts(self, config: EpDispatchCombineConfig) -> bool:
        """Whether the dispatch casts the tokens."""
        return config.casts_in_dispatch and self.dtype != FP8_DTYPE

    def scale_bytes(self, config: EpDispatchCombineConfig) -> int:
        """Bytes of the scales of a row that the call brings."""
        return config.num_scales * config.scale_bytes if self.has_scales else 0

    def read_as(self, config: EpDispatchCombineConfig, scale_bytes: int | None = None) -> Step:
        """The dtypes in which kernels read the arguments: in words, but tokens that they cast.

        scale_bytes: scales are read in words where so many bytes fill words; None = those of a row.
        """
        words: Any = torch.int32
        tokens: Any = self.dtype if self.casts(config) else words
        width = self.scale_bytes(config) if scale_bytes is None else scale_bytes
        scales: Any = torch.uint8 if self.has_scales and width % WORD_BYTES else words
        return Step(tokens, words, scales, words, step_tokens=0)


class CombineForm(NamedTuple):
    """What the launches of a combine depend on, beside the op; calls of one form share their launches.

    Attributes:
        has_weights, has_ids: whether the call brings them.
        has_biases: the same of bias_0 and bias_1.
        num_tokens: T.
        bounds: the step's.
    """

    has_weights: bool
    has_ids: bool
    has_biases: tuple[bool, bool]
    num_tokens: int
    bounds: Bounds

    @classmethod
    def of(cls, args: CombineArguments) -> CombineForm:
        """The form of a call."""
        bias_0, bias_1 = args.biases
        has_biases = bias_0 is not None, bias_1 is not None
        return cls(args.weights is not None, args.ids is not None, has_biases, args.num_tokens, args.bounds)

    def read_as(self, config: EpDispatchCombineConfig) -> CombineArguments:
        """The dtypes in which kernels read the arguments: in words, but rows that they cast, results and biases."""
        words: Any = torch.int32
        dtype: Any = config.combined_dtype
        rows = words if config.combine_quant == QuantType.NONE else dtype
        biases = [dtype if has_bias else None for has_bias in self.has_biases]
        return CombineArguments(rows, words, words, dtype, biases, expert_rows=dtype)


def dispatch_forms(config: EpDispatchCombineConfig, step_tokens: int) -> Iterator[DispatchForm]:
    """The forms of dispatches for which an op compiles kernels."""
    bounds = Bounds.of(config, step_tokens)
    only_serving = config.compiled_calls == CompiledCalls.SERVING
    dtypes = [config.data_type]
    if config.casts_in_dispatch and not only_serving:
        dtypes.append(FP8_DTYPE)
    given_scales = (False, True) if config.num_scales else (False,)
    for dtype in dtypes:
        casts = config.casts_in_dispatch and dtype != FP8_DTYPE
        for has_scales in (config.takes_scale,) if casts else given_scales[-1:] if only_serving else given_scales:
            # in layout expert_major weights always travel
            for has_weights in (True,) if only_serving or config.layout == Layout.EXPERT_MAJOR else (False, True):
                yield DispatchForm(dtype, has_scales, has_weights, step_tokens, bounds)


def combine_forms(config: EpDispatchCombineConfig, step_tokens: int) -> Iterator[CombineForm]:
    """The forms of combines for which an op compiles kernels."""
    bounds = Bounds.of(config, step_tokens)
    only_serving = config.compiled_calls == CompiledCalls.SERVING
    # in layout expert_major weights never come back
    for has_weights in (False,) if only_serving or config.layout == Layout.EXPERT_MAJOR else (False, True):
        for has_ids in (False,) if only_serving else (False, True):
            yield CombineForm(has_weights, has_ids, (False, False), step_tokens, bounds)


def dispatch_operands(args: Step, table: torch.Tensor) -> tuple[Any, ...]:
    """Of a kernel that does a whole dispatch."""
    rows = args.tokens, args.scales, args.weights, args.ids
    return *rows, table, args.num_tokens, args.bounds.step_tokens, args.wire_word, args.pad_id


def receiving_operands(args: Step, table: torch.Tensor) -> tuple[Any, ...]:
    """Of the receiving stage alone, which reads no row."""
    rows = args.ids, args.ids, args.ids, args.ids
    return *rows, table, args.num_tokens, args.bounds.step_tokens, args.wire_word, args.pad_id


def row_operands(args: Step, table: torch.Tensor) -> tuple[Any, ...]:
    """Of kernels that put rows into lines."""
    return args.tokens, args.scales, args.weights, args.ids, table


def numbering_operands(args: Step, table: torch.Tensor) -> tuple[Any, ...]:
    """Of a kernel that numbers rows."""
    return args.ids, table, args.num_tokens, args.wire_word


def combine_operands(args: CombineArguments, table: torch.Tensor) -> tuple[Any, ...]:
    """Of a kernel that does a whole combine."""
    return args.rows, args.weights, args.out, args.ids, *args.biases, table


def offering_operands(args: CombineArguments, table: torch.Tensor) -> tuple[Any, ...]:
    """Of a kernel that offers results to the node."""
    return args.rows, args.weights, table


def sum_operands(args: CombineArguments, table: torch.Tensor) -> tuple[Any, ...]:
    """Of kernels that add the nodes' sums."""
    return args.out, args.ids, *args.biases, table


def reducing_operands(args: CombineArguments, table: torch.Tensor) -> tuple[Any, ...]:
    """Of a kernel that adds an expert's rows."""
    return args.expert_rows, table


def no_operands(_: Any, table: torch.Tensor) -> tuple[Any, ...]:
    """Of kernels that read the op's memory only."""
    return (table,)
