"""Orders the uses of shared memory: one process, one step at a time, calls across streams; detects captures."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING

import torch

from ep_a2a.errors import AlternationError, ForkedProcessError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.memory.symmetric import SymmetricMemory

_recorded_on_cpu = False


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's launches on `device` are captured instead of run; on CPU, inside of `recording_on_cpu`."""
    return torch._C._cuda_isCurrentStreamCapturing() if device.type == "cuda" else _recorded_on_cpu


@contextlib.contextmanager
def recording_on_cpu() -> Iterator[None]:
    """Makes calls on CPU fail as in a GPU's capture where they need memory or code that a capture cannot make."""
    global _recorded_on_cpu
    _recorded_on_cpu = True
    try:
        yield
    finally:
        _recorded_on_cpu = False


class OwnProcess:
    """The process that made an object whose memory and connections belong to it.

    A forked child has the same memory mapped and the same connection to the store: its calls would be taken for its
    parent's.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this is that process, and not a forked child of it."""
        return os.getpid() == self._pid

    def require(self, what: str) -> None:
        """Raises ForkedProcessError in a forked child.

        Args:
            what: the object, for the error's text.
        """
        if not self.is_current:
            raise ForkedProcessError(
                f"{what} to be used by process {self._pid}, which made it", f"process {os.getpid()}"
            )


class StreamOrder:
    """Orders each call behind the previous one when that ran on another stream.

    Attributes:
        has_captured: whether a graph has captured a call.
    """

    def __init__(self) -> None:
        self.has_captured = False
        self._last: tuple[int, bool, torch.cuda.Stream] | None = None

    def follow(self, device: torch.device) -> None:
        """Makes the current stream wait for the previous call; to be called before anything is launched."""
        if device.type != "cuda":
            return
        # The stream's number costs a tenth of the host time of its Python object.
        number, capturing = torch._C._cuda_getCurrentRawStream(device.index), is_capturing(device)
        last = self._last
        if last is not None and last[0] == number and last[1] == capturing:
            return
        self.has_captured |= capturing
        stream = torch.cuda.current_stream(device)
        # a capture begins with a device synchronisation and cannot wait for streams outside, or of an earlier capture
        if last is not None and last[0] != number and last[1] == capturing:
            with torch.cuda.stream(last[2]):
                is_same = is_capturing(device) == capturing
            if is_same:
                stream.wait_stream(last[2])
        self._last = (number, capturing, stream)


class Slot:
    """Memory that ops of one index share; at most one of them may be between dispatch and combine.

    Attributes:
        symmetric, local: the shared blocks, by role.
        streams: order among the calls on this memory, whichever op makes them.
    """

    def __init__(self) -> None:
        self.symmetric: dict[str, list[SymmetricMemory]] = {}
        self.local: dict[str, list[torch.Tensor]] = {}
        self.streams = StreamOrder()
        self._fill_bytes: dict[str, int] = {}
        self._user: weakref.ref[object] | None = None
        self._was_left_open = False

    def refill(self) -> None:
        """Brings this rank's shared blocks into the state between steps. No rank may be using them."""
        for role, value in self._fill_bytes.items():
            for block in self.symmetric.get(role, []):
                block.local.fill_(value)
        self._was_left_open = False
        if not self.in_use:
            self._user = None

    @property
    def spoilt(self) -> bool:
        """Whether shared blocks may not hold their fill byte: an op was closed, or collected, in a step."""
        return self._was_left_open or (self._user is not None and not self.in_use)

    def spoil(self) -> None:
        """Marks the slot as left by an op in the middle of a step, or after one that failed."""
        self._was_left_open = True

    def fill_new(self, role: str, block: SymmetricMemory, value: int) -> None:
        """Fills a new block and records the value for `refill`."""
        self._fill_bytes[role] = value
        block.local.fill_(value)

    def enter(self, op: object) -> None:
        """Marks the slot as used by an op's step.

        Raises:
            AlternationError: another op's step is not over.
            StateError: the memory was left in the middle of a step.
        """
        user = None if self._user is None else self._user()
        if self._was_left_open or (user is None and self._user is not None):
            raise StateError(
                "memory between two steps",
                "an op that shared it was closed or dropped in the middle of a step",
                "Call reset() of this op on every rank.",
            )
        if user is not None and user is not op:
            raise AlternationError(
                "one op at a time to be between dispatch and combine in the memory that ops of one index share",
                "dispatch of a second op before combine of the first",
                "Give ops whose steps overlap different indices: get_handle(kwargs, index).",
            )
        self._user = weakref.ref(op)

    def leave(self, op: object) -> None:
        """Ends an op's step."""
        if self._user is not None and self._user() is op:
            self._user = None

    @property
    def in_use(self) -> bool:
        """Whether an op is in the middle of a step."""
        return self._user is not None and self._user() is not None
