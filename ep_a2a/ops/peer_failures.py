"""Polls for failures of an op that peers have reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ep_a2a.ops.failures import error_of

if TYPE_CHECKING:
    from ep_a2a.ops.op import EpDispatchCombineOp


class PeerFailures:
    """Polls for failures of an op on any rank, for a rank that takes results of others into its own.

    `op.check` raises what kernels of this rank have met. Where the last kernel of a step fails on another rank only,
    this one learns of it by its next kernel. That is too late if it has used what the other rank's step has given.

    Args:
        op: whose memory is read. A report lies there before the failed kernel of its rank ends.
    """

    def __init__(self, op: EpDispatchCombineOp) -> None:
        self._op = op

    def check(self) -> None:
        """Raises what any rank had found when the kernels that this rank has waited for ended.

        Raises:
            RankTimeoutError, AlternationError, ConfigMismatchError, CapacityError, ForeignIndicesError: as found.
        """
        failure = self._op.memory.poison.read()
        if failure is not None:
            # this rank's own kernels know more
            self._op.check()
            raise error_of(failure, self._op.memory, self._op.timeouts)
