"""Polls for failures of an op that peers have reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.kernels.layout import Region
from ep_a2a.ops.failures import Failure, error_of

if TYPE_CHECKING:
    from ep_a2a.ops.op import EpDispatchCombineOp

RANK_BITS = 16
"""Low bits of a poison word, code << 16 | accused rank, that hold the rank (kernels/primitives.py)."""


class PeerFailures:
    """Polls for failures of an op on any rank, for a rank that takes results of others into its own.

    `op.check` raises what kernels of this rank have met. Where the last kernel of a step fails on another rank only,
    this one learns of it by its next kernel. That is too late if it has used what the other rank's step has given.

    Args:
        op: whose memory is read. A report lies there before the failed kernel of its rank ends.
    """

    def __init__(self, op: EpDispatchCombineOp) -> None:
        self._op, self._word = op, op.memory.view(Region.POISON)
        on_gpu = op.device.type == "cuda"
        # of its own, so that nothing waits for kernels that still run
        self._stream = torch.cuda.Stream(op.device) if on_gpu else None  # type: ignore[no-untyped-call]
        with torch.inference_mode(False):  # whoever checks may be in this mode or not
            self._copy = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu)

    def check(self) -> None:
        """Raises what any rank had found when the kernels that this rank has waited for ended.

        Raises:
            RankTimeoutError, AlternationError, ConfigMismatchError, CapacityError, ForeignIndicesError: as found.
        """
        word = self._read()
        if word:
            # this rank's own kernels know more
            self._op.check()
            failure = Failure.of_peer(word >> RANK_BITS, word & ((1 << RANK_BITS) - 1))
            raise error_of(failure, self._op.memory, self._op.timeouts)

    def _read(self) -> int:
        if self._stream is None:
            return int(self._word)
        with torch.cuda.stream(self._stream):
            self._copy.copy_(self._word, non_blocking=True)
        self._stream.synchronize()
        return int(self._copy)
