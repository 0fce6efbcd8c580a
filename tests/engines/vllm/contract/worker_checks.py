"""Checks in a real vLLM: what a worker does around a step, and what of a failed one leaves it."""

import functools
import gc
import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.engines.vllm.contract.checks import OURS, refused, replaced

TIMEOUT_SECS = 12.5


def with_manager(check: Callable[[mock.Mock], None]) -> Callable[[], None]:
    """The process has one manager, whose `check` raises what a check tells it to, and the worker is patched."""

    @functools.wraps(check)
    def checked() -> None:
        from vllm.v1.worker import cpu_worker  # noqa: F401 - loaded before the patch, as in an engine on CPU

        from ep_a2a.integrations.manager import EngineManager, live_managers
        from ep_a2a.integrations.vllm.worker import patch_worker

        manager = mock.Mock(EngineManager, rank=1)
        manager.gone_ranks.return_value = ()
        patch_worker()
        live_managers.add(manager)
        try:
            check(manager)
        finally:
            live_managers.discard(manager)

    return checked


def output_of(get_output: Callable[[], Any]) -> Any:
    """An asynchronous output that vLLM takes for one."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    members = {"get_output": lambda _: get_output(), "get_kv_connector_output": lambda _: None}
    return type("Output", (AsyncModelRunnerOutput,), members)()


def stepping(output: Any) -> Callable[[], Any]:
    """A worker's step that ends with this output."""
    from ep_a2a.integrations.vllm.worker import _checked

    return lambda: _checked(lambda worker, scheduled: output)(object(), "scheduled")


@with_manager
def check_the_workers_calls_are_checked(manager: mock.Mock) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from ep_a2a.integrations.vllm import worker

    for name in worker.CHECKED_CALLS:
        for owner in (Worker, CPUWorker):
            assert OURS in getattr(owner, name).__code__.co_filename
            assert getattr(owner, name).__name__ == name
    calls = [vars(Worker)[name] for name in worker.CHECKED_CALLS]
    worker.patch_worker()
    assert [vars(Worker)[name] for name in worker.CHECKED_CALLS] == calls


@with_manager
def check_a_failed_step_hands_out_no_tokens(manager: mock.Mock) -> None:
    for output in (None, SimpleNamespace(tokens=[1])):
        step = stepping(output)
        manager.check.side_effect = None
        assert step() is output
        manager.check.side_effect = TimeoutError("rank 3 did not come")
        with refused(TimeoutError, "rank 3"):
            step()
    assert manager.check.call_count == 4


@with_manager
def check_a_failed_step_hands_out_no_tokens_later_either(manager: mock.Mock) -> None:
    """With asynchronous outputs the step's kernels may still run when the call returns."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    output = stepping(output_of(lambda: "tokens"))()
    assert isinstance(output, AsyncModelRunnerOutput)
    assert manager.check.call_count == 0
    assert output.get_output() == "tokens"
    assert manager.check.call_count == 1
    output = stepping(output_of(lambda: "tokens"))()
    manager.check.side_effect = TimeoutError("rank 3 did not come")
    with refused(TimeoutError, "rank 3"):
        output.get_output()


@with_manager
def check_vllms_outputs_can_be_watched(manager: mock.Mock) -> None:
    """Their classes have neither slots nor frozen fields."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

    for kind in (AsyncOutput, AsyncGPUModelRunnerOutput):
        output = kind.__new__(kind)
        with replaced(kind, "get_output", lambda _: "tokens"):
            assert stepping(output)() is output
            assert output.get_output() == "tokens"
    assert manager.check.call_count == 2


@with_manager
def check_outputs_that_nobody_asks_for_are_freed_at_once(manager: mock.Mock) -> None:
    """vLLM takes only one tensor-parallel rank's; they hold tensors of the device."""
    gc.disable()
    try:
        step = stepping(output_of(lambda: "tokens"))
        freed = weakref.ref(step())
        del step
        assert freed() is None
    finally:
        gc.enable()


@with_manager
def check_errors_of_the_step_itself_arrive_as_they_are(manager: mock.Mock) -> None:
    from ep_a2a.integrations.vllm.worker import _checked

    def fail(_: Any) -> None:
        raise ZeroDivisionError("the model's own")

    manager.check.side_effect = TimeoutError("and a rank did not come")
    with refused(ZeroDivisionError, "the model's own"):
        _checked(fail)(object())
    manager.close_open_steps.assert_called_once_with()
    # one of vLLM's own exchanges says that a connection was closed, not whose
    manager.gone_ranks.return_value = (3,)
    with refused(TimeoutError, "rank 3 is gone", "the model's own"):
        _checked(fail)(object())


@with_manager
def check_waits_are_shortened_when_any_worker_has_warmed_up(manager: mock.Mock) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    from ep_a2a.integrations.vllm.worker import WARM_UP, _then_shorten_waits

    for worker in (Worker, CPUWorker):
        assert "/integrations/vllm/" in getattr(worker, WARM_UP).__code__.co_filename, worker.__name__
    with mock.patch.dict(os.environ, EP_A2A_TIMEOUT_SECS=str(TIMEOUT_SECS)):
        assert _then_shorten_waits(lambda worker: "times")(object()) == "times"
    manager.end_warm_up.assert_called_once_with(TIMEOUT_SECS)


def sent_by(output: Any) -> tuple[str, Any]:
    """What a worker's process sends for this output: status and content."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    sent: list[tuple[Any, Any]] = []
    WorkerProc.enqueue_output(SimpleNamespace(worker_response_mq=SimpleNamespace(enqueue=sent.append)), output)
    assert len(sent) == 1
    return sent[0][0].name, sent[0][1]


def check_vllm_sends_an_error_in_an_output() -> None:
    """So what `get_checked_output` raises reaches the engine."""

    def fail() -> None:
        raise TimeoutError("rank 3 did not come")

    assert sent_by("tokens") == ("SUCCESS", "tokens")
    assert sent_by(output_of(lambda: "tokens")) == ("SUCCESS", "tokens")
    assert sent_by(ValueError("of the step")) == ("FAILURE", "of the step")
    assert sent_by(output_of(fail)) == ("FAILURE", "rank 3 did not come")
