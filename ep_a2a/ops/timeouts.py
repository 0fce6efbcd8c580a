"""Time-outs of an op: how long its kernels wait for other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ep_a2a.config.requirements import checked_seconds

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig

NS_PER_SEC = 1_000_000_000
FIRST_EPOCH = 1


@dataclass(frozen=True)
class Timeouts:
    """Seconds that one wait for other ranks may take.

    Attributes:
        step_secs: in any step but the first. first_step_secs: in the first since the op was built or reset, in which
            other ranks may still be loading, compiling or capturing.
    """

    step_secs: float
    first_step_secs: float

    @classmethod
    def of(cls, config: EpDispatchCombineConfig) -> Timeouts:
        """The time-outs of an op's config."""
        return cls(config.timeout, config.first_timeout)

    @classmethod
    def same(cls, timeout_secs: float) -> Timeouts:
        """The same time-out for all steps.

        Raises:
            ConfigError: it is not a number of seconds that the kernels' clock can count.
        """
        timeout_secs = checked_seconds("timeout_secs", timeout_secs)
        return cls(timeout_secs, timeout_secs)

    def of_step(self, epoch: int) -> float:
        """The time-out of a step, in seconds; steps count from 1."""
        return self.first_step_secs if epoch == FIRST_EPOCH else self.step_secs

    def in_nanoseconds(self) -> tuple[int, int]:
        """In the order in which kernels read them: of a step, of the first step."""
        return int(self.step_secs * NS_PER_SEC), int(self.first_step_secs * NS_PER_SEC)

    def named(self, epoch: int) -> str:
        """The time-out that held in a step, as "name = seconds"."""
        if epoch == FIRST_EPOCH and self.first_step_secs != self.step_secs:
            return f"first_timeout_secs = {self.first_step_secs:g}"
        return f"timeout_secs = {self.step_secs:g}"
