"""Errors of this package: one class per cause, with the expected state, the found one, and a remedy."""

import contextlib
import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

REFERENCE = "docs/errors.md"
"""The page with a section for each class below; its anchor is the class's name in lower case."""
MAX_TOKENS = (
    "the tokens per rank (max_num_inp_token_per_rank, handle kwarg max_num_tokens_per_dp_rank, option --max-tokens)"
)
"""The bound that sizes an op's memory, by its names in a configuration, among handle kwargs and on the command line."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_max_tokens_name: ContextVar[str] = ContextVar("max_tokens_name", default=MAX_TOKENS)
_LAST_LINE = re.compile(rf"\nSee {re.escape(REFERENCE)}#\w+\.")


def shown(value: object) -> str:
    """Returns a value as errors show it: its repr on one line, shortened where it is long or deeply nested."""
    try:
        return " ".join(_SHORT.repr(value).split())
    except ValueError:
        return f"{type(value).__name__} of very many digits"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `Did you mean 'x'?` for the known name closest to `name`, or "" when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


def without_section(text: str) -> str:
    """Returns a text without the lines by which errors of this package name their section."""
    return _LAST_LINE.sub("", text)


@contextlib.contextmanager
def max_tokens_named(name: str) -> Iterator[None]:
    """Lets remedies of errors that are made meanwhile say `name` for MAX_TOKENS.

    Each interface that users come through names its own option or argument; of nested ones the outermost counts.
    """
    outer = _max_tokens_name.get()
    token = _max_tokens_name.set(name if outer == MAX_TOKENS else outer)
    try:
        yield
    finally:
        _max_tokens_name.reset(token)


def max_tokens_name() -> str:
    """Returns the name that remedies say for MAX_TOKENS now."""
    return _max_tokens_name.get()


class EpA2AError(Exception):
    """Base of all errors of this package. The text's last line names the class's section in the documentation.

    Args:
        expected: the required state or value.
        got: the state or value that was found; the text of another error may be part of it.
        remedy: the next step for the reader; None takes the class's default.
        field: the configuration field or argument that holds the wrong value; `expected` goes on from its name, for
            example "to be 1 or more". None where the error is about no single field.

    Attributes:
        expected: the required state or value, from the field's name on.
        got, remedy: as given.
        field: as given. A caller whose reader knows the field by another name sets that name.
    """

    remedy = "See docs/architecture.md."

    def __init__(self, expected: str, got: str, remedy: str | None = None, *, field: str | None = None) -> None:
        self.field = field
        self._expected, self.got = without_section(expected), without_section(got)
        self.remedy = (self.remedy if remedy is None else remedy).replace(MAX_TOKENS, max_tokens_name())
        # a subclass whose own text fails can still be raised
        super().__init__(EpA2AError.__str__(self))

    def __str__(self) -> str:
        return f"expected {self.expected}; got {self.got}. {self.remedy}\nSee {self.section}."

    @property
    def expected(self) -> str:
        """The required state or value, from the field's name on."""
        return f"{self.field} {self._expected}" if self.field else self._expected

    @property
    def section(self) -> str:
        """The section of the documentation on this class, or on the class of this package that it extends."""
        kind = next(each for each in type(self).__mro__ if each.__module__ == __name__)
        return f"{REFERENCE}#{kind.__name__.lower()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._expected, self.got, self.remedy), vars(self)


class ConfigError(EpA2AError, ValueError):
    """A configuration value is impossible by itself, whatever the other ranks say."""

    remedy = "Correct the named field of the configuration."


class EnvironmentVariableError(EpA2AError, ValueError):
    """An EP_A2A_* environment variable holds a value that cannot be used."""

    remedy = "Correct or unset the variable; docs/env.md lists them all."


class UnknownNameError(EpA2AError, ValueError):
    """A backend, kernel or option name is not known."""

    remedy = "Use one of the listed names."


class MissingPackageError(EpA2AError, ImportError):
    """The request needs an optional package that is not installed."""

    remedy = "Install the package."


class UnsupportedError(EpA2AError, RuntimeError):
    """A valid request cannot be served on this machine or in this version."""

    remedy = "Choose another backend or kernel."


class AbsentNameError(UnsupportedError, AttributeError):
    """A library whose import name this package has taken (compat.install) lacks this name here."""

    remedy = "Leave the name out."


class AbsentModuleError(UnsupportedError, ModuleNotFoundError):
    """A library whose import name this package has taken (compat.install) lacks this module or its name here."""

    remedy = "Leave the import out."


class InputError(EpA2AError, ValueError):
    """A tensor, or another argument of a call, does not fit; raised before anything is launched."""

    remedy = "Correct the argument; nothing was launched, so the op is still usable."


class DtypeError(InputError, TypeError):
    """A tensor has the wrong dtype."""


class DeviceError(InputError):
    """A tensor lives on another device than the op."""


class ContiguityError(InputError):
    """A tensor is not contiguous, or does not start at a multiple of 16 bytes."""

    remedy = "Pass tensor.contiguous(); nothing was launched."


class ShapeError(InputError):
    """A tensor has the wrong number of dimensions or a wrong size."""


class HiddenSizeError(ShapeError):
    """The hidden size of a tensor is not the configured one."""


class TopKError(ShapeError):
    """The number of experts per token is not the configured one."""


class TooManyTokensError(ShapeError):
    """A rank brought more tokens than the agreed maximum."""

    remedy = f"Raise {MAX_TOKENS}, or the step_tokens that was given, on every rank, or split the batch."


class StateError(EpA2AError, RuntimeError):
    """A call came in an order that the op does not allow."""


class AlternationError(StateError):
    """dispatch and combine of one op did not alternate."""

    remedy = (
        "Call combine once after each dispatch of an op; micro-batches need one op each: get_handle(kwargs, index)."
    )


class ForeignIndicesError(EpA2AError, ValueError):
    """combine was given other expert ids than this rank's dispatch."""

    remedy = "Pass this rank's own topk_ids, the tensor given to dispatch (not the dispatched ids), or None."


class ClosedError(StateError):
    """An op, manager or memory block was used after it had been closed."""

    remedy = "Make a new one: get_handle(kwargs) of a manager, or make_op."


class ForkedProcessError(StateError):
    """A forked child used groups, arenas or ops of its parent, which the parent shares with other ranks."""

    remedy = "Start processes by spawn or forkserver, and make groups, arenas and ops in the process that uses them."


class ConfigMismatchError(EpA2AError, RuntimeError):
    """The ranks of a group disagree about a value that must be equal on all of them."""

    remedy = "Give every rank the same value."


class CapacityError(EpA2AError, RuntimeError):
    """A rank received more rows than max_total_recv_tokens allows."""

    remedy = (
        "op.reset() on every rank makes this op usable again. For more rows, build another op with a larger "
        "max_total_recv_tokens (0 means no cap)."
    )


class RankTimeoutError(EpA2AError, TimeoutError):
    """A wait for other ranks ran out of time.

    Attributes:
        missing_ranks: ranks of the group that are gone, in ascending order: their processes have ended, or nothing is
            heard from them any more. All survivors of a host name the same ranks. Of a meeting on the host also ranks
            that did not come and were never seen.
        late_ranks: where nobody is gone, ranks that live and that others waited for, in ascending order.
        wanted: the epoch that a kernel waited for; None where no kernel waited.
        seen: by kind of flag ("counts" and "flags" of a dispatch, "flags" of a combine), the epoch that each rank's
            stands at here, in rank order, read when the error was raised; 0 for one that was never posted.
    """

    remedy = (
        "Look at the named ranks' logs; if they are only slow, raise timeout_secs (EP_A2A_TIMEOUT_SECS), or for "
        "an op's first step first_timeout_secs (EP_A2A_FIRST_TIMEOUT_SECS)."
    )

    def __init__(
        self,
        expected: str,
        got: str,
        remedy: str | None = None,
        missing_ranks: tuple[int, ...] = (),
        wanted: int | None = None,
        seen: Mapping[str, tuple[int, ...]] | None = None,
        late_ranks: tuple[int, ...] = (),
    ) -> None:
        super().__init__(expected, got, remedy)
        self.missing_ranks = missing_ranks
        self.late_ranks = late_ranks
        self.wanted = wanted
        self.seen = dict(seen or {})


class HostMemoryError(EpA2AError, OSError):
    """Shared host memory could not be had."""

    remedy = f"Enlarge /dev/shm (for containers: --shm-size or --ipc=host) or lower {MAX_TOKENS}."


class DeviceMemoryError(EpA2AError, RuntimeError):
    """Device memory that peers can map could not be had."""

    remedy = f"Free device memory or lower {MAX_TOKENS}."


class GpuLostError(EpA2AError, RuntimeError):
    """This process has lost its CUDA context; under MPS another process that died in a kernel may have taken it."""

    remedy = "This process cannot use its GPU again: end it, and start new processes for all ranks of that GPU."


class PeerAccessError(EpA2AError, RuntimeError):
    """Two ranks of one node cannot reach each other's memory."""

    remedy = "Check `nvidia-smi topo -m`; ranks without peer access need the allgather_reducescatter backend."


class UntrustedFolderError(EpA2AError, RuntimeError):
    """Code would be executed, or memory shared, from where another user may have written."""

    remedy = "Use a folder that belongs to this user alone."


class NotInitializedError(StateError):
    """Something distributed was used before it was set up."""

    remedy = "Call ep_a2a.init_dist_env(...) first."


class CheckFailedError(EpA2AError, AssertionError):
    """A benchmark's contender returned a wrong result; its times would mean nothing."""

    remedy = "Its times are not shown; look at the contender, or at how the benchmark calls it."
