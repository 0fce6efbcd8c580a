"""Dispatches that may still be combined. DeepEP's calls come in any order, those of an op alternate: this is between.

An op's step is open from its dispatch to its combine. A buffer keeps up to `max_open_steps` open, each on memory of its
own index. All ranks make the same calls in the same order, so that they decide alike, without speaking with each other.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ep_a2a.errors import ConfigError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.ops.op import EpDispatchCombineOp

logger = logging.getLogger(__name__)


class Hook:
    """What DeepEP returns for `return_recv_hook`: called without arguments, it receives. Calling it again does nothing.

    Args:
        receive: launches the receiving half.

    Attributes:
        is_done: whether that has happened.
    """

    def __init__(self, receive: Callable[[], None]) -> None:
        self._receive = receive
        self.is_done = False
        self._is_displaced = False

    def __call__(self) -> None:
        """Receives; StateError where another dispatch has taken the memory since."""
        if self._is_displaced:
            raise StateError(
                "the hook to be called before its memory is needed again", "a call after that",
                "Call the hook before as many further dispatches as the buffer keeps open (max_open_steps).",
            )  # fmt: skip
        self.finish()

    def finish(self) -> None:
        """Receives, unless that has been done."""
        if not self.is_done:
            self.is_done = True
            self._receive()

    def displace(self) -> None:
        """Receives for an op that must go on; what came is going to be overwritten, which a later call is told."""
        if not self.is_done:
            self.finish()
            self._is_displaced = True


class Step:
    """One dispatch on an op.

    Attributes:
        op: which one. index: of its memory.
        rows_shape: of the rows that its combine takes.
        is_open: whether the op still holds this dispatch.
        dispatch_hook, combine_hook: the receiving halves, where the calls were made in halves.
    """

    def __init__(self, op: EpDispatchCombineOp, index: int, rows_shape: tuple[int, ...]) -> None:
        self.op, self.index, self.rows_shape = op, index, rows_shape
        self.is_open = True
        self.dispatch_hook: Hook | None = None
        self.combine_hook: Hook | None = None

    def close(self) -> None:
        """To be called when the op's combine has been launched to its end."""
        self.is_open = False

    def displace(self) -> None:
        """Ends the op's step, so that its memory can be used again: as it was begun, or by a combine of anything."""
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


class Steps:
    """The open steps of a buffer.

    Args:
        max_open_steps: how many; 1 at least.
    """

    def __init__(self, max_open_steps: int) -> None:
        if max_open_steps < 1:
            raise ConfigError("max_open_steps >= 1", str(max_open_steps))
        self.max_open_steps = max_open_steps
        self._steps: list[Step] = []

    def free_index(self) -> int:
        """The lowest memory index without an open step; where there is none, the oldest step is displaced."""
        self._steps = [step for step in self._steps if step.is_open]
        if len(self._steps) == self.max_open_steps:
            self._steps.pop(0).displace()
        used = {step.index for step in self._steps}
        return next(index for index in range(self.max_open_steps) if index not in used)

    def add(self, step: Step) -> None:
        """Takes up a dispatch that has been made."""
        self._steps.append(step)

    def clear(self) -> None:
        """Forgets all steps, whose ops are closed."""
        for step in self._steps:
            step.close()
        self._steps.clear()
