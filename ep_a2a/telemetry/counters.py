"""Counts dispatch and combine on the device: tokens, rows, bytes, skew of ranks, and waits of each step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.kernels.compilation import compile_all
from ep_a2a.kernels.compiled_kernel import CompiledKernel
from ep_a2a.kernels.counter_kernels import (
    LINE_WORDS,
    Counter,
    count_combine_kernel,
    count_dispatch_kernel,
    start_wait_kernel,
)
from ep_a2a.kernels.layout import padded
from ep_a2a.memory.allocator_isolation import outside_pools

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.interface import CombineResult, DispatchResult
    from ep_a2a.ops.op import EpDispatchCombineOp

NS_PER_US = 1000
SCALE_BYTES = 4
"""Bytes of a scale that combine sends."""


class StepCounters:
    """Counters of the steps of one layer on this rank, in device memory outside of an engine's pools.

    Args:
        device: where the layer runs.
        num_kept_steps: the number of latest steps that are kept one by one, beside the sums; at least 1.

    Attributes:
        lines: int64 [1 + num_kept_steps, LINE_WORDS]; see counter_kernels.
    """

    def __init__(self, device: torch.device, num_kept_steps: int) -> None:
        shape = (1 + num_kept_steps, LINE_WORDS)
        self.num_kept_steps = num_kept_steps
        self.lines = outside_pools(lambda: torch.zeros(shape, dtype=torch.int64, device=device), device)

    def clear(self) -> None:
        """Set all counters to 0, on the current stream. Call it between two steps."""
        self.lines.zero_()

    def read(self, config: EpDispatchCombineConfig) -> dict[str, Any]:
        """The counts so far, by name. The host waits for the current stream.

        A row is a token sent to one rank. A kept row stays on its own rank. Each rank knows all ranks' rows.
        rank_rows is their mean per rank; skew_rows is the excess of the rank that received most over that mean. Bytes
        are those of rows and their scales, of dispatch and combine together, without ids, weights and flags.

        Args:
            config: of the op that is counted.

        Returns:
            num_steps, then sums over steps of num_tokens, num_kept_rows, num_sent_rows, num_received_rows, sent_bytes,
            received_bytes, rank_rows, skew_rows, dispatch_wait_us, combine_wait_us; the largest of one step,
            max_skew_rows, max_dispatch_wait_us, max_combine_wait_us; and latest_steps, a list with the values of
            each step that is kept and its number `step`, in ascending order.
        """
        totals, *kept = self.lines.tolist()
        steps = sorted((line for line in kept if line[Counter.STEPS]), key=lambda line: line[Counter.STEPS])
        return {
            "num_steps": totals[Counter.STEPS],
            **_values(totals, config),
            "max_skew_rows": totals[Counter.MAX_SCALED_SKEW] / config.world_size,
            "max_dispatch_wait_us": totals[Counter.MAX_DISPATCH_WAIT_NS] / NS_PER_US,
            "max_combine_wait_us": totals[Counter.MAX_COMBINE_WAIT_NS] / NS_PER_US,
            "latest_steps": [{"step": line[Counter.STEPS], **_values(line, config)} for line in steps],
        }


def _values(line: list[int], config: EpDispatchCombineConfig) -> dict[str, Any]:
    sent, received = line[Counter.SENT_ROWS], line[Counter.RECEIVED_ROWS]
    dispatched = config.hidden_dim * config.wire_dtype.itemsize + config.num_scales * config.scale_bytes
    combined = config.hidden_dim * config.combine_wire_dtype.itemsize + config.num_combine_scales * SCALE_BYTES
    return {
        "num_tokens": line[Counter.TOKENS],
        "num_kept_rows": line[Counter.KEPT_ROWS],
        "num_sent_rows": sent,
        "num_received_rows": received,
        # every received row goes back as a result
        "sent_bytes": sent * dispatched + received * combined,
        "received_bytes": received * dispatched + sent * combined,
        "rank_rows": line[Counter.ALL_ROWS] / config.world_size,
        "skew_rows": line[Counter.SCALED_SKEW] / config.world_size,
        "dispatch_wait_us": line[Counter.DISPATCH_WAIT_NS] / NS_PER_US,
        "combine_wait_us": line[Counter.COMBINE_WAIT_NS] / NS_PER_US,
    }


class InstrumentedOp:
    """Counts the dispatches and combines of one layer. Ranks that count may work with ranks that do not.

    Both calls run in halves with a time stamp between them. A wait is the time of the receiving half: its launch, and
    until the last row of any rank has come and is read. With nothing to wait for it takes some microseconds. The
    sending half waits for other ranks only in layout compact.

    Args:
        op: carries the tokens; several layers may share it.
        counters: of this layer, on the op's device.
    """

    def __init__(self, op: EpDispatchCombineOp, counters: StepCounters) -> None:
        self.op, self.counters = op, counters
        self.engine = _CounterKernels(op, counters)
        # whoever captures a graph may not have made a call of this size before
        op.warmup_split()
        self.engine.compile()

    def __getattr__(self, name: str) -> Any:
        """Look up every attribute that is not defined here on the op."""
        return getattr(self.op, name)

    @outside_graphs
    def dispatch(self, input: torch.Tensor, *args: Any, **options: Any) -> DispatchResult:  # noqa: A002
        """Dispatch in two halves. Arguments are those of `DispatchCombineOp.dispatch_send`."""
        self.op.dispatch_send(input, *args, **options)
        self.engine.start_wait()
        result = self.op.dispatch_recv()
        self.engine.count_dispatch(input.shape[0])
        return result

    @outside_graphs
    def combine(self, *args: Any, **options: Any) -> CombineResult:
        """Combine in two halves. Arguments are those of `DispatchCombineOp.combine_send`."""
        self.op.combine_send(*args, **options)
        return self.combine_recv()

    @outside_graphs
    def combine_recv(self) -> CombineResult:
        """End a combine. Work that is launched between the halves does not count as waiting."""
        self.engine.start_wait()
        result = self.op.combine_recv()
        self.engine.count_combine()
        return result


class _CounterKernels:
    """Launches the counting kernels; each is one program."""

    def __init__(self, op: EpDispatchCombineOp, counters: StepCounters) -> None:
        self._device, self._lines, self._num_kept = op.device, counters.lines, counters.num_kept_steps
        self._table, self._config, self._rank = op.memory.table, op.config, op.config.rank
        self._start, self._dispatch, self._combine = _kernels(op.config.world_size, op.device)

    def compile(self) -> None:
        """Compile and load the counting kernels on a GPU; launch nothing."""
        if self._device.type == "cuda":
            kernels = (
                (self._start, (self._lines,)),
                (self._dispatch, self._dispatch_values(0)),
                (self._combine, (self._lines, self._num_kept)),
            )
            compile_all(kernels, self._config)

    def start_wait(self) -> None:
        """Launch the time stamp before a receiving half."""
        self._start.run(1, (self._lines,), self._device)

    def count_dispatch(self, num_tokens: int) -> None:
        """Launch the count of a dispatch of num_tokens tokens of this rank."""
        self._dispatch.run(1, self._dispatch_values(num_tokens), self._device)

    def count_combine(self) -> None:
        """Launch the count of a combine."""
        self._combine.run(1, (self._lines, self._num_kept), self._device)

    def _dispatch_values(self, num_tokens: int) -> tuple[Any, ...]:
        return self._lines, self._table, num_tokens, self._num_kept, self._rank


@functools.cache
def _kernels(world_size: int, device: torch.device) -> tuple[CompiledKernel, CompiledKernel, CompiledKernel]:
    """The kernels that start a wait, count a dispatch and count a combine; all layers of a device share them."""
    world = {"WORLD_SIZE": world_size, "WORLD_LANES": padded(world_size), "COUNT_LANES": 32}
    return (
        CompiledKernel(start_wait_kernel, {}, num_warps=1),
        CompiledKernel(count_dispatch_kernel, world, num_warps=1),
        CompiledKernel(count_combine_kernel, {}, num_warps=1),
    )
