"""What a client is told when an engine ends because of an error of ours: that error, behind vLLM's fixed text.

An engine process that dies sends its clients one constant message, and they raise EngineDeadErrors with one constant
text; the error itself stays in the engine's log. Patched, the message carries the error's text, and so do the client's
EngineDeadErrors from then on. Errors that are not ours are told as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import EpA2AError
from ep_a2a.integrations.vllm.common import BACKEND_NAME, logger

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGE = "ENGINE_CORE_DEAD"
"""The attribute of EngineCoreProc with the constant message."""
SEPARATOR = b": "

WORKER_FAILED = "Worker failed with error '", "', please check the"
"""vLLM's words around the text of an error of a worker in a process of its own: the engine has no more of it."""

_told: tuple[weakref.ref[Any], str] | None = None
"""In a client's process: the latest client that was told of its engine's end, and the cause; None without one."""


def patch_engine() -> None:
    """Patches `engine-cause`, `client-cause` and `dead-error`, all or none. Idempotent, and never raises.

    A vLLM whose engines end in another way keeps its fixed text.
    """
    try:
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.engine.core_client import BackgroundResources
        from vllm.v1.engine.exceptions import EngineDeadError

        if getattr(EngineCoreProc._send_engine_dead, "is_ours", False):
            return
        message = getattr(EngineCoreProc, MESSAGE)
        users = (
            EngineCoreProc._send_engine_dead, EngineCoreProc.process_output_sockets, BackgroundResources.validate_alive
        )  # fmt: skip
        if not isinstance(message, bytes) or not all(_reads_message(each) for each in users):
            raise AttributeError(f"{MESSAGE} is not used as it was")
        send = _sending_cause(EngineCoreProc, message)
        validate = _remembering_cause(BackgroundResources.validate_alive, message)
        init = _adding_cause(EngineDeadError.__init__)
    except Exception as error:  # noqa: BLE001 - whatever differs, the engine works without
        logger.debug("clients are not told why an engine ends", exc_info=error)
        return
    EngineCoreProc._send_engine_dead = send
    BackgroundResources.validate_alive = validate
    EngineDeadError.__init__ = init


def cause_of(error: BaseException | None) -> str | None:
    """The text of the first error of ours among `error` and what led to it, None if there is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # Ray's error of a worker is of the class of its cause, too, but with a traceback for a text
        for each in (getattr(error, "cause", None), error):
            if isinstance(each, EpA2AError):
                return str(each)
        told = _told_by_worker(str(error))
        if told is not None:
            return told
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _told_by_worker(text: str) -> str | None:
    """The text of an error of ours, which its first words tell, within vLLM's; None if it is not there."""
    before, behind = WORKER_FAILED
    told, ends, _ = text.partition(before)[2].rpartition(behind)
    return told if ends and told.startswith("expected ") and "; got " in told else None


def _reads_message(function: Callable[..., Any]) -> bool:
    return MESSAGE in inspect.unwrap(function).__code__.co_names


def _sending_cause(engine_class: Any, message: bytes) -> Callable[..., Any]:
    """`_send_engine_dead`, which an engine calls while it handles the error that it dies of."""
    send = engine_class._send_engine_dead

    @functools.wraps(send)
    def send_engine_dead(self: Any, *args: Any, **kwargs: Any) -> Any:
        # nothing here may stand in the way of the original
        with contextlib.suppress(Exception):
            cause = cause_of(sys.exc_info()[1])
            if cause is not None and _clients_are_python():
                # the thread that sends compares with this attribute; the process ends with this message
                setattr(engine_class, MESSAGE, message + SEPARATOR + cause.encode(errors="replace"))
        return send(self, *args, **kwargs)

    send_engine_dead.is_ours = True  # type: ignore[attr-defined]
    return send_engine_dead


def _clients_are_python() -> bool:
    """Whether clients know the longer message: vLLM's frontend in Rust compares with the constant."""
    from vllm import envs

    return not getattr(envs, "VLLM_USE_RUST_FRONTEND", False)


def _remembering_cause(validate: Callable[..., Any], message: bytes) -> Callable[..., Any]:
    """`validate_alive`, to which a client gives each message of its engines."""
    import zmq

    @functools.wraps(validate)
    def validate_alive(self: Any, frames: Any) -> Any:
        # outputs are arrays of msgpack, whose first byte is none of ASCII
        if len(frames) != 1 or frames[0].buffer[: len(message)] != message:
            return validate(self, frames)
        global _told
        cause = bytes(frames[0].buffer).removeprefix(message).removeprefix(SEPARATOR).decode(errors="replace")
        _told = (weakref.ref(self), cause) if cause else None
        return validate(self, [zmq.Frame(message)])

    return validate_alive


def _adding_cause(init: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineDeadError.__init__`: clients make such errors anew in several places, without one that led to them."""

    @functools.wraps(init)
    def init_with_cause(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # another thread may change it meanwhile
        told = _told
        # the process may have other engines afterwards, and the text is not about these
        if told is None or told[0]() is None or not self.args:
            return
        cause = f"{BACKEND_NAME}: {told[1]}"
        self.args = (f"{self.args[0]} {cause}", *self.args[1:])
        # from vLLM 0.33 HTTP clients get this text in place of the error's
        if hasattr(self, "CLIENT_MESSAGE"):
            self.CLIENT_MESSAGE = f"{self.CLIENT_MESSAGE} {cause}"

    return init_with_cause
