"""The open steps of a buffer: DeepEP's calls come in any order, while dispatch and combine of an op alternate.

An op's step is open from its dispatch to its combine. A buffer keeps up to `max_open_steps` open, each on memory of its
own index. All ranks make the same calls in the same order, so they decide alike without communication.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ep_a2a.config.requirements import checked_integer
from ep_a2a.errors import StateError
from ep_a2a.graph_breaks import outside_graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.ops.op import EpDispatchCombineOp

logger = logging.getLogger(__name__)


class Hook:
    """DeepEP's hook of `return_recv_hook`: the first call receives, later calls do nothing.

    The half is launched on the stream that was current when the hook was made, that of the sending half, as DeepEP's.

    Args:
        receive: launches the receiving half.
        device: of the op's memory.

    Attributes:
        is_done: whether `receive` has been called.
    """

    def __init__(self, receive: Callable[[], None], device: torch.device) -> None:
        self._receive = receive
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.is_done = False
        self._is_displaced = False

    @outside_graphs
    def __call__(self) -> None:
        """Receives. Raises StateError if another dispatch has taken the memory."""
        if self._is_displaced:
            raise StateError(
                "the hook to be called before its memory is needed again",
                "a call after that",
                "Call the hook before as many further dispatches as the buffer keeps open (max_open_steps).",
            )
        self.finish()

    def finish(self) -> None:
        """Receives, unless it has been done."""
        if not self.is_done:
            self.is_done = True
            with torch.cuda.stream(self._stream):  # None changes nothing
                self._receive()

    def displace(self) -> None:
        """Receives because the op's memory is needed. The rows will be overwritten, so a later call raises."""
        if not self.is_done:
            self.finish()
            self._is_displaced = True


class Step:
    """One dispatch on an op.

    Attributes:
        op: the op. index: that of its memory.
        rows_shape: shape of the rows that its combine takes.
        is_open: whether the op still holds this dispatch.
        is_displaced: whether it was ended unasked, before its combine.
        number: counts the buffer's dispatches.
        dispatch_hook, combine_hook: the receiving halves of split calls.
    """

    def __init__(self, op: EpDispatchCombineOp, index: int, rows_shape: tuple[int, ...]) -> None:
        self.op, self.index, self.rows_shape = op, index, rows_shape
        self.is_open, self.is_displaced = True, False
        self.number = 0
        self.dispatch_hook: Hook | None = None
        self.combine_hook: Hook | None = None

    def close(self) -> None:
        """Marks the step as combined; must be called when both halves of combine have been launched."""
        self.is_open = False

    def displace(self) -> None:
        """Ends the op's step to free its memory: finishes a combine that has begun, else combines zeros."""
        if not self.is_open:
            return
        if self.combine_hook is not None:
            self.combine_hook.finish()
            return
        logger.info("a dispatch is combined unasked, because its memory is needed for another one")
        if self.dispatch_hook is not None:
            self.dispatch_hook.displace()
        config = self.op.config
        rows = torch.zeros(self.rows_shape, dtype=config.combined_dtype, device=self.op.device)
        self.op.combine(rows, None, None)
        self.close()
        self.is_displaced = True


class Steps:
    """The open steps of a buffer.

    Args:
        max_open_steps: how many; 1 at least.
    """

    def __init__(self, max_open_steps: int) -> None:
        self.max_open_steps = checked_integer("max_open_steps", max_open_steps, 1)
        self._steps: list[Step] = []
        self._num_added = 0
        self._newest_rows: dict[int, int] = {}

    def free_index(self) -> int:
        """Returns the lowest memory index without an open step. If there is none, displaces the oldest step."""
        self._steps = [step for step in self._steps if step.is_open]
        if len(self._steps) == self.max_open_steps:
            self._steps.pop(0).displace()
        used = {step.index for step in self._steps}
        return next(index for index in range(self.max_open_steps) if index not in used)

    def add(self, step: Step, *, keeps_rows: bool) -> None:
        """Adds a dispatch that has been launched.

        Args:
            step: of the dispatch.
            keeps_rows: whether the caller reads the received rows in the memory of the step's index, as in low-latency
                mode. All ops of an index keep them in the same memory.
        """
        self._num_added += 1
        step.number = self._num_added
        self._steps.append(step)
        if keeps_rows:
            self._newest_rows[step.index] = step.number

    def expect_rows(self, step: Step) -> None:
        """Checks that no later dispatch has overwritten a step's rows before the step's combine.

        Raises:
            StateError: one has. Nobody knows whether the experts had read the rows by then.
        """
        if step.is_displaced and self._newest_rows[step.index] != step.number:
            raise StateError(
                f"at most {self.max_open_steps} dispatches to wait for their combine (max_open_steps)",
                "the combine of one whose rows a later dispatch has overwritten",
                "Combine it earlier, or create the Buffer with a larger max_open_steps on every rank.",
            )

    def clear(self) -> None:
        """Removes all steps; their ops must be closed."""
        for step in self._steps:
            step.close()
        self._steps.clear()
        self._newest_rows.clear()
