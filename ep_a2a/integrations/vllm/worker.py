"""What a vLLM worker does around a step for our ops: waits that fit the phase, and no token of a failed step."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from ep_a2a import env
from ep_a2a.integrations.vllm.common import logger
from ep_a2a.integrations.vllm.counters import RPC_METHOD, read_counters

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep_a2a.integrations.vllm.manager import VllmAll2AllManager

managers: weakref.WeakSet[VllmAll2AllManager] = weakref.WeakSet()
"""Of this process; a worker has one."""

CHECKED_CALLS = ("execute_model", "sample_tokens", "execute_dummy_batch")
WARM_UP = "compile_or_warm_up_model"


def patch_worker() -> None:
    """Patches `worker-steps`, `worker-warm-up` and `worker-counters`. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    if getattr(Worker.execute_model, "is_ours", False):
        return
    # the CPU's worker, for one, has a warm-up of its own
    for worker in (Worker, *Worker.__subclasses__()):
        for name in CHECKED_CALLS:
            if name in vars(worker):
                setattr(worker, name, _checked(vars(worker)[name]))
        if WARM_UP in vars(worker):
            setattr(worker, WARM_UP, _then_shorten_waits(vars(worker)[WARM_UP]))
    setattr(Worker, RPC_METHOD, _read_counters)
    _patch_output_thread()


def check_ops() -> None:
    """Raises what the kernels of finished steps have recorded."""
    for manager in managers:
        manager.check()


def _read_counters(self: Any) -> dict[str, Any]:
    """The worker's method by which collective_rpc reads the counters of its layers; see read_counters."""
    return read_counters(managers, self.vllm_config.compilation_config.static_forward_context)


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's call that raises in place of handing out tokens of a step that failed.

    The replay of a whole step as one graph runs no Python of ours, so it is here that a failure is noticed: when the
    tokens are on the host, which is behind the step's kernels.
    """

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            output = call(self, *args, **kwargs)
        except BaseException:
            # whatever it was, a layer may have dispatched and not combined
            for manager in managers:
                manager.close_open_steps()
            raise
        get_output = getattr(type(output), "get_output", None)
        if get_output is None:
            check_ops()
            return output
        # a reference to itself would keep the step's tensors until garbage is collected
        reference = weakref.ref(output)

        def get_checked_output(*args: Any, **kwargs: Any) -> Any:
            result = get_output(reference(), *args, **kwargs)
            check_ops()
            return result

        output.get_output = get_checked_output
        return output

    checked.is_ours = True  # type: ignore[attr-defined]
    return checked


def _then_shorten_waits(warm_up: Callable[..., Any]) -> Callable[..., Any]:
    """The worker's warm-up, after which ranks are no longer minutes apart."""

    @functools.wraps(warm_up)
    def warm_up_and_shorten(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = warm_up(self, *args, **kwargs)
        for manager in managers:
            manager.end_warm_up(env.TIMEOUT_SECS.get())
        return result

    return warm_up_and_shorten


def _patch_output_thread() -> None:
    """Patch `output-thread`: up to vLLM 0.24 an error in get_output ends the thread that sends outputs, silently."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    enqueue = WorkerProc.enqueue_output

    @functools.wraps(enqueue)
    def enqueue_output(self: Any, output: Any) -> Any:
        try:
            return enqueue(self, output)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is sent as the step's result
            logger.exception("a step's output could not be had")
            return enqueue(self, error)

    WorkerProc.enqueue_output = enqueue_output
