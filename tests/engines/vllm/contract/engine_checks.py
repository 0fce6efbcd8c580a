"""Checks in a real vLLM: what an engine that dies tells its clients, and what these tell theirs."""

import contextlib
import gc
import inspect
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.engines.vllm.contract.checks import replaced
from tests.engines.vllm.contract.config_checks import chosen

FIXED_TEXT = "EngineCore encountered an issue"


def timed_out() -> Exception:
    from ep_a2a.errors import RankTimeoutError

    return RankTimeoutError("every rank within 20.0 s", "rank 3 did not arrive")


def sent_for(error: BaseException) -> bytes:
    """What an engine sends that dies of `error`, by its own methods: the thread's comparison included."""
    from vllm.v1.engine.core import EngineCoreProc

    queued: list[Any] = []
    engine = SimpleNamespace(
        output_queue=SimpleNamespace(put_nowait=queued.append),
        output_thread=SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False),
    )
    with replaced(EngineCoreProc, "ENGINE_CORE_DEAD", EngineCoreProc.ENGINE_CORE_DEAD):
        try:
            raise error
        except Exception:  # noqa: BLE001 - as in run_engine_core
            EngineCoreProc._send_engine_dead(engine)
        assert queued == [EngineCoreProc.ENGINE_CORE_DEAD]
    return bytes(queued[0])


def client_told(message: bytes) -> tuple[Any, Exception]:
    """A client that gets this message, and what it raises."""
    import zmq
    from vllm.v1.engine.core_client import BackgroundResources
    from vllm.v1.engine.exceptions import EngineDeadError

    resources = BackgroundResources(ctx=None)
    try:
        resources.validate_alive([zmq.Frame(message)])
    except EngineDeadError as error:
        return resources, error
    raise AssertionError("the client has not noticed")


def check_the_engine_is_patched_where_its_configuration_is_made() -> None:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.core_client import BackgroundResources
    from vllm.v1.engine.exceptions import EngineDeadError

    from ep_a2a.integrations.vllm.engine_error import patch_engine

    VllmConfig(parallel_config=chosen())
    functions = [EngineCoreProc._send_engine_dead, BackgroundResources.validate_alive, EngineDeadError.__init__]
    assert all("/integrations/vllm/" in each.__code__.co_filename for each in functions)
    patch_engine()
    VllmConfig(parallel_config=chosen())
    assert functions == [EngineCoreProc._send_engine_dead, BackgroundResources.validate_alive, EngineDeadError.__init__]


def check_clients_are_told_our_errors() -> None:
    text = str(timed_out())
    message = sent_for(timed_out())
    assert message == b"ENGINE_CORE_DEAD: " + text.encode()
    resources, error = client_told(message)
    assert resources.engine_dead
    assert FIXED_TEXT in str(error)
    assert f"ep_a2a: {text}" in str(error)


def check_causes_of_other_errors_are_told() -> None:
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = timed_out()
    while_handling = ValueError("cannot be logged")
    while_handling.__context__ = wrapped
    assert sent_for(while_handling).endswith(str(timed_out()).encode())


def check_errors_of_workers_in_other_processes_are_told() -> None:
    """Their text is within vLLM's own, which is looked up here."""
    from vllm.v1.executor import multiproc_executor

    source = inspect.getsource(multiproc_executor)
    assert "f\"Worker failed with error '{result}', please check the\"" in source
    text = str(timed_out())
    failed = RuntimeError(f"Worker failed with error '{text}', please check the stack trace above for the root cause")
    assert sent_for(failed) == b"ENGINE_CORE_DEAD: " + text.encode()


def check_errors_of_rays_workers_are_told_without_their_traceback() -> None:
    """As Ray raises them: of the cause's class and its own, the cause being an attribute."""
    from ep_a2a.errors import RankTimeoutError

    class RayTaskError(RankTimeoutError):
        def __init__(self, cause: Exception) -> None:
            self.cause, self.args = cause, (cause,)

        def __str__(self) -> str:
            return f"ray::RayWorkerWrapper.execute_method() (ip=192.0.2.1)\n{self.cause}"

    assert sent_for(RayTaskError(timed_out())) == b"ENGINE_CORE_DEAD: " + str(timed_out()).encode()


def check_long_and_broken_texts_are_no_burden() -> None:
    """An engine that dies must not think about it for long, nor stumble over what cannot be encoded."""
    for text in ("expected " * 20000 + "; got " * 20000, "'expected " * 20000, "\ud800" * 20000):
        assert sent_for(RuntimeError(f"Worker failed with error '{text}")) == b"ENGINE_CORE_DEAD"
    from ep_a2a.errors import EpA2AError

    _, error = client_told(sent_for(EpA2AError("\ud800", "x" * (1 << 20))))
    assert "expected ?; got xxx" in str(error)


def check_other_errors_are_told_as_before() -> None:
    hidden = ValueError("of the model")
    hidden.__context__, hidden.__suppress_context__ = timed_out(), True
    other = RuntimeError("Worker failed with error 'out of memory', please check the stack trace above")
    circle = ValueError("one"), ValueError("another")
    circle[0].__context__, circle[1].__context__ = circle[1], circle[0]
    for error in (hidden, other, ZeroDivisionError(), circle[0]):
        assert sent_for(error) == b"ENGINE_CORE_DEAD"
    earlier, _ = client_told(sent_for(timed_out()))
    resources, error = client_told(b"ENGINE_CORE_DEAD")
    assert earlier.engine_dead
    assert resources.engine_dead
    assert str(error).endswith("for the root cause.")


def check_the_engine_dies_as_before_when_the_cause_cannot_be_told() -> None:
    from ep_a2a.errors import EpA2AError

    class WithoutText(EpA2AError):
        def __str__(self) -> str:
            raise ZeroDivisionError

    assert sent_for(WithoutText("a", "b")) == b"ENGINE_CORE_DEAD"
    with mock.patch.dict(os.environ, VLLM_USE_RUST_FRONTEND="1"):
        assert sent_for(timed_out()) == b"ENGINE_CORE_DEAD"


def check_all_errors_of_the_client_have_the_cause() -> None:
    """As vLLM makes them later: for requests under way, for new ones, and for HTTP."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    resources, _ = client_told(sent_for(timed_out()))
    client = SimpleNamespace(resources=resources)
    found: list[Any] = [MPClient._format_exception(client, ValueError()), AsyncLLM.dead_error.fget(None)]
    with contextlib.suppress(EngineDeadError):
        MPClient.ensure_alive(client)
        raise AssertionError("taken for alive")
    for error in found:
        assert isinstance(error, EngineDeadError)
        assert "rank 3 did not arrive" in str(error)
        assert "rank 3 did not arrive" in message_over_http(error)


def message_over_http(error: Exception) -> str:
    try:
        from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    except ImportError:
        # vLLM 0.24
        from vllm.entrypoints.serve.utils.error_response import create_error_response
    return str(create_error_response(error).error.message)


def check_the_cause_is_forgotten_with_its_client() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    resources, error = client_told(sent_for(timed_out()))
    assert resources.engine_dead
    assert "rank 3" in str(EngineDeadError())
    # the error knows the frame that it was raised in
    del resources, error
    gc.collect()
    assert "rank 3" not in str(EngineDeadError())


def check_outputs_are_left_alone() -> None:
    """Those of an engine that is alive, one frame or more."""
    import zmq
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core_client import BackgroundResources
    from vllm.v1.serial_utils import MsgpackEncoder

    frames = [zmq.Frame(bytes(each)) for each in MsgpackEncoder().encode(EngineCoreOutputs(engine_index=1))]
    resources = BackgroundResources(ctx=None)
    for message in (frames, [*frames, zmq.Frame(b"more")], [zmq.Frame(b"")], [zmq.Frame(b"ENGINE_CORE_DEAD")] * 2):
        resources.validate_alive(message)
    assert not resources.engine_dead


def check_an_engine_that_ends_in_another_way_is_left_alone() -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.core_client import BackgroundResources

    from ep_a2a.integrations.vllm.engine_error import patch_engine

    def other(self: Any, frames: Any) -> None:
        """Does not know the message."""

    original = inspect.unwrap(EngineCoreProc._send_engine_dead)
    with replaced(EngineCoreProc, "_send_engine_dead", original):
        for owner, name, value in (
            (BackgroundResources, "validate_alive", other),
            (EngineCoreProc, "process_output_sockets", other),
            (EngineCoreProc, "ENGINE_CORE_DEAD", 7),
        ):
            with replaced(owner, name, value):
                patch_engine()
                assert EngineCoreProc._send_engine_dead is original
                assert vars(owner)[name] is value
