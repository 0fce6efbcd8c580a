"""The poison word of an op, read and written by the host while kernels run."""

from __future__ import annotations

import torch

from ep_a2a.kernels.layout import FailureCode
from ep_a2a.ops.failures import Failure

RANK_BITS = 16
"""Low bits of a poison word, code << 16 | accused rank, that hold the rank (kernels/primitives.py)."""


def failure_of(word: int) -> Failure | None:
    """Returns the failure that a poison word reports; None for 0."""
    return Failure.of_peer(word >> RANK_BITS, word & ((1 << RANK_BITS) - 1)) if word else None


class PoisonWord:
    """This rank's poison word: kernels that wait leave when it is not 0, and later ones send nothing.

    On a GPU copies go by a stream of their own, so that nothing waits for kernels that still run. `post` makes no call
    that would break the capture of a graph in another thread.

    Args:
        word: int32 [1], in the op's memory.

    Attributes:
        word: as given. Work that is enqueued behind a kernel reads there what this kernel has met.
    """

    def __init__(self, word: torch.Tensor) -> None:
        self.word, self._device = word, word.device
        on_gpu = word.is_cuda
        self._stream = torch.cuda.Stream(word.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._seen, self._posted = (
            torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=on_gpu) for _ in range(2)
        )

    def read(self) -> Failure | None:
        """Returns the failure that any rank had reported here when the kernels that this rank has waited for ended."""
        return failure_of(self._read())

    def _read(self) -> int:
        if self._stream is None:
            return int(self.word)
        with torch.cuda.stream(self._stream):
            self._seen.copy_(self.word, non_blocking=True)
        self._stream.synchronize()
        return int(self._seen)

    def post(self, rank: int) -> None:
        """Makes kernels leave, since `rank` is gone. Returns at once; any thread may call it."""
        value = FailureCode.TIMEOUT << RANK_BITS | rank
        with torch.inference_mode():
            if self._stream is None:
                # an earlier failure takes precedence
                if not int(self.word):
                    self.word.fill_(value)
                return
            self._posted.numpy()[0] = value
            with torch.cuda.stream(self._stream):
                self.word.copy_(self._posted, non_blocking=True)
