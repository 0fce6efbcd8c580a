"""Guards of an op: the caller's torch modes and gradients, its process, the step that uses its memory, its streams."""

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._C import _is_torch_function_mode_enabled, _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

from ep_a2a.errors import AlternationError, ClosedError, ForkedProcessError, InputError, StateError
from ep_a2a.memory.symmetric import SymmetricMemory

Call = TypeVar("Call", bound="Callable[..., Any]")

_recorded_on_cpu = False


def guarded(call: Call) -> Call:
    """Guard a public method that exchanges tensors: from tensors that require grad, and from the caller's torch modes.

    While torch records gradients, a tensor that requires grad raises InputError: its gradient would be lost. Modes that
    change torch's functions (a default device, FakeTensorMode, ...) do not reach the call, whose tensors are real.
    """

    @functools.wraps(call)
    def guard(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for given in (args, kwargs.values()):
                for each in given:
                    if getattr(each, "requires_grad", False) or type(each) in _NESTED:
                        _refuse_gradients(call, args, kwargs)
        if _len_torch_dispatch_stack() or _is_torch_function_mode_enabled():
            with _plain_functions():
                return call(*args, **kwargs)
        return call(*args, **kwargs)

    return guard  # type: ignore[return-value]


_NESTED = (tuple, list)


def _refuse_gradients(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name, value in inspect.signature(call).bind(*args, **kwargs).arguments.items():
        if _requires_grad(value):
            raise InputError(
                f"tensors without gradients, which {call.__name__} does not hand on",
                f"{name} that requires grad",
                f"Call ep_a2a.autograd, which has gradients, or call under torch.no_grad(), or pass {name}.detach().",
            )


def _requires_grad(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return any(map(_requires_grad, value)) if type(value) in _NESTED else getattr(value, "requires_grad", False)


@contextlib.contextmanager
def _plain_functions() -> Iterator[None]:
    """Context in which the caller's modes do not change torch's functions."""
    # to take none off would take 12 us
    no_modes = _disable_current_modes() if _len_torch_dispatch_stack() else contextlib.nullcontext()
    with torch._C.DisableTorchFunction(), no_modes:
        yield


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Context, or decorator, in which none of the caller's torch modes holds, inference mode included.

    For tensors that outlive the call: a later caller, in any mode, may write to them.
    """
    with torch.inference_mode(mode=False), _plain_functions():
        yield


def is_capturing(device: torch.device) -> bool:
    """Whether a graph captures this thread's launches on `device`; on CPU, whether `recording_on_cpu` is active."""
    return torch._C._cuda_isCurrentStreamCapturing() if device.type == "cuda" else _recorded_on_cpu


@contextlib.contextmanager
def recording_on_cpu() -> Iterator[None]:
    """Context in which calls on CPU fail as in a GPU's capture: where they need new memory or newly compiled code."""
    global _recorded_on_cpu
    _recorded_on_cpu = True
    try:
        yield
    finally:
        _recorded_on_cpu = False


class OwnProcess:
    """Remembers the process that made an object with shared memory or connections.

    A forked child inherits both. Other ranks would take its calls for those of its parent.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether this process made the object, and is no forked child."""
        return os.getpid() == self._pid

    def require(self, what: str) -> None:
        """Raise ForkedProcessError in a forked child; `what` names the object in the error."""
        if not self.is_current:
            raise ForkedProcessError(
                f"{what} to be used by process {self._pid}, which made it", f"process {os.getpid()}"
            )


ALWAYS_OPEN = frozenset({"closed", "close", "destroy", "config", "device"})


def become_closed(thing: object, what: str, remedy: str | None = None, *, tells: tuple[str, ...] = ()) -> None:
    """Make every public method and property of an object raise ClosedError, but those in ALWAYS_OPEN; idempotent.

    The object gets another class, so that calls of open ones check nothing.

    Args:
        thing: the object.
        what: its kind, for the error. remedy: that of the error; None is the class's.
        tells: methods that stay, since they tell the other ranks that this one is closed.
    """
    kind: Any = type(thing)
    if not hasattr(kind, "_of_closed_objects"):
        thing.__class__ = _closed_kind(kind, what, remedy, ALWAYS_OPEN.union(tells))


@functools.cache
def _closed_kind(kind: type, what: str, remedy: str | None, stay: frozenset[str]) -> Any:
    def refuse(*_: object, **__: object) -> Any:
        raise ClosedError(f"an open {what}", "a closed one", remedy)

    members: dict[str, Any] = {
        name: property(refuse) if isinstance(member, property | functools.cached_property) else refuse
        for name, member in inspect.getmembers_static(kind)
        if not name.startswith("_") and name not in stay and hasattr(type(member), "__get__")
    }
    members |= {"__module__": kind.__module__, "__doc__": kind.__doc__, "_of_closed_objects": True}
    return type(kind.__name__, (kind,), members)


class StreamOrder:
    """Makes each call wait for the one before, if that ran on another stream.

    Attributes:
        has_captured: whether a graph has captured a call.
    """

    def __init__(self) -> None:
        self.has_captured = False
        self._last: tuple[int, bool, torch.cuda.Stream] | None = None

    def follow(self, device: torch.device) -> None:
        """Make the current stream wait for the previous call. Call it before the first launch."""
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


class SharedBlocks:
    """Memory that ops of one index share. At most one of these ops may be between dispatch and combine.

    Attributes:
        symmetric, local: the blocks by role, for ops of different sizes.
        streams: orders the calls of all these ops.
    """

    def __init__(self) -> None:
        self.symmetric: dict[str, list[SymmetricMemory]] = {}
        self.local: dict[str, list[torch.Tensor]] = {}
        self.streams = StreamOrder()
        self._fill_bytes: dict[str, int] = {}
        self._user: weakref.ref[Any] | None = None
        self._was_left_open = False

    def refill(self) -> None:
        """Bring this rank's blocks into the state between steps. No rank may be using them."""
        for role, value in self._fill_bytes.items():
            for block in self.symmetric.get(role, []):
                block.local.fill_(value)
        self._was_left_open = False
        if not self.in_use:
            self._user = None

    @property
    def spoilt(self) -> bool:
        """Whether blocks may lack their fill byte, because an op was closed or collected in the middle of a step."""
        return self._was_left_open or (self._user is not None and not self.in_use)

    def spoil(self) -> None:
        """Mark the memory as left by an op in the middle of a step, or after a failure."""
        self._was_left_open = True

    def symmetric_block(
        self, role: str, num_bytes: int, fill_byte: int | None, make: Callable[[int], SymmetricMemory]
    ) -> SymmetricMemory:
        """A symmetric block of at least num_bytes; a new one is filled with fill_byte, if that is given."""
        blocks = self.symmetric.setdefault(role, [])
        for block in blocks:
            if block.num_bytes >= num_bytes:
                return block
        blocks.append(make(num_bytes))
        if fill_byte is not None:
            self._fill_bytes[role] = fill_byte
            blocks[-1].local.fill_(fill_byte)
        return blocks[-1]

    def local_block(self, role: str, num_bytes: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Memory of this rank of at least num_bytes, uint8."""
        blocks = self.local.setdefault(role, [])
        if not any(block.numel() >= num_bytes for block in blocks):
            blocks.append(make(num_bytes))
        return next(block for block in blocks if block.numel() >= num_bytes)

    @property
    def num_local_bytes(self) -> int:
        """Bytes of the memory of this rank."""
        return sum(block.numel() for blocks in self.local.values() for block in blocks)

    def enter(self, op: object) -> None:
        """Mark the memory as used by a step of an op, after the end of a step that another one has left.

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
        if user is not None and user is not op and not user.end_left_step():
            raise AlternationError(
                "one op at a time to be between dispatch and combine in the memory that ops of one index share",
                "dispatch of a second op before combine of the first",
                "Give ops whose steps overlap different indices: get_handle(kwargs, index).",
            )
        self._user = weakref.ref(op)

    def leave(self, op: object) -> None:
        """Mark the op's step as ended."""
        if self._user is not None and self._user() is op:
            self._user = None

    @property
    def in_use(self) -> bool:
        """Whether an op is in the middle of a step."""
        return self._user is not None and self._user() is not None
