"""Patches that add the text of an EpA2AError to vLLM's EngineDeadError, so that clients learn which rank stopped.

Without the patches a dying engine sends its clients a constant message. The clients raise EngineDeadError with a
constant text, and the cause stands only in the engine's log. With the patches the engine's message carries the text of
an EpA2AError that ended it. The clients' EngineDeadErrors end with this text, over HTTP in the body of status 500.
vLLM reports all other errors without change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import EpA2AError
from ep_a2a.integrations.vllm.common import BACKEND_NAME, is_replacement, logger, replacement

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGE = "ENGINE_CORE_DEAD"
"""The attribute of EngineCoreProc that holds the constant message."""
SEPARATOR = b": "

WORKER_FAILED = "Worker failed with error '", "', please check the"
"""vLLM's words around the error of a worker process, of which the engine has only this text."""

_latest_cause: tuple[weakref.ref[Any], str] | None = None
"""In a client's process: the client that got the latest message with a cause, and the cause."""


def patch_engine() -> None:
    """Patches `engine-cause`, `client-cause` and `dead-error`, all or none. Idempotent, and never raises.

    A vLLM whose engines end in another way keeps its constant text.
    """
    try:
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.engine.core_client import BackgroundResources
        from vllm.v1.engine.exceptions import EngineDeadError

        if is_replacement(EngineCoreProc._send_engine_dead):
            return
        message = getattr(EngineCoreProc, MESSAGE)
        users = (
            EngineCoreProc._send_engine_dead,
            EngineCoreProc.process_output_sockets,
            BackgroundResources.validate_alive,
        )
        if not isinstance(message, bytes) or not all(_reads_message(each) for each in users):
            raise AttributeError(f"{MESSAGE} is not used as it was")
        send = _sending_cause(EngineCoreProc, message)
        validate = _keeping_cause(BackgroundResources.validate_alive, message)
        init = _adding_cause(EngineDeadError.__init__)
    except Exception as error:  # noqa: BLE001 - the engine works without these patches
        logger.debug("vLLM's clients will not get the cause of an engine's end", exc_info=error)
        return
    EngineCoreProc._send_engine_dead = send
    BackgroundResources.validate_alive = validate
    EngineDeadError.__init__ = init


def cause_of(error: BaseException | None) -> str | None:
    """Returns the text of the first EpA2AError among `error` and its causes, or None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # Ray's error is also of its cause's class, but its text is a traceback
        for each in (getattr(error, "cause", None), error):
            if isinstance(each, EpA2AError):
                return str(each)
        text = _text_from_worker(str(error))
        if text is not None:
            return text
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _text_from_worker(text: str) -> str | None:
    """Returns the text of an EpA2AError inside vLLM's WORKER_FAILED, or None.

    The text of every EpA2AError begins with "expected " and contains "; got ".
    """
    before, behind = WORKER_FAILED
    found, ends, _ = text.partition(before)[2].rpartition(behind)
    return found if ends and found.startswith("expected ") and "; got " in found else None


def _reads_message(function: Callable[..., Any]) -> bool:
    return MESSAGE in inspect.unwrap(function).__code__.co_names


def _sending_cause(engine_class: Any, message: bytes) -> Callable[..., Any]:
    """Wraps `_send_engine_dead`, which an engine calls while it handles its last error: the message gets the cause."""
    send = engine_class._send_engine_dead

    @replacement
    @functools.wraps(send)
    def send_engine_dead(self: Any, *args: Any, **kwargs: Any) -> Any:
        # whatever fails here, the original must run
        with contextlib.suppress(Exception):
            cause = cause_of(sys.exc_info()[1])
            if cause is not None and _clients_are_python():
                # the sending thread compares with this attribute; this message is the process's last
                setattr(engine_class, MESSAGE, message + SEPARATOR + cause.encode(errors="replace"))
        return send(self, *args, **kwargs)

    return send_engine_dead


def _clients_are_python() -> bool:
    """Whether clients accept the longer message: vLLM's Rust frontend compares with the constant one."""
    from vllm import envs

    return not getattr(envs, "VLLM_USE_RUST_FRONTEND", False)


def _keeping_cause(validate: Callable[..., Any], message: bytes) -> Callable[..., Any]:
    """Wraps `validate_alive`, which gets each message of a client: keeps the cause, passes the constant message on."""
    import zmq

    @functools.wraps(validate)
    def validate_alive(self: Any, frames: Any) -> Any:
        # other messages are msgpack arrays, whose first byte is not ASCII
        if len(frames) != 1 or frames[0].buffer[: len(message)] != message:
            return validate(self, frames)
        global _latest_cause
        cause = bytes(frames[0].buffer).removeprefix(message).removeprefix(SEPARATOR).decode(errors="replace")
        _latest_cause = (weakref.ref(self), cause) if cause else None
        return validate(self, [zmq.Frame(message)])

    return validate_alive


def _adding_cause(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `EngineDeadError.__init__`: clients make these errors in several places, without a cause."""

    @functools.wraps(init)
    def init_with_cause(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # read once: another thread may replace it
        latest = _latest_cause
        # a cause of a client that is gone does not concern the process's later engines
        if latest is None or latest[0]() is None or not self.args:
            return
        cause = f"{BACKEND_NAME}: {latest[1]}"
        self.args = (f"{self.args[0]} {cause}", *self.args[1:])
        # from vLLM 0.33, HTTP clients get this text instead of the error's
        if hasattr(self, "CLIENT_MESSAGE"):
            self.CLIENT_MESSAGE = f"{self.CLIENT_MESSAGE} {cause}"

    return init_with_cause
