"""Patches of vLLM's worker: time-outs that fit the phase, and no tokens of a failed step."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ep_a2a import env
from ep_a2a.integrations.manager import dead_ranks_named, live_managers
from ep_a2a.integrations.vllm.stages import live_stages

SENDING_CALL = "execute_model"
"""That in which a pipeline stage sends its hidden states."""
CHECKED_CALLS = (SENDING_CALL, "sample_tokens", "execute_dummy_batch")
WARM_UP = "compile_or_warm_up_model"


@functools.cache
def patch_worker() -> None:
    """Patches `worker-steps` and `worker-warm-up`. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    # subclasses may override these methods: the CPU's worker has a warm-up of its own
    for worker in (Worker, *Worker.__subclasses__()):
        for name in CHECKED_CALLS:
            if name in vars(worker):
                setattr(worker, name, _checked(vars(worker)[name], sends=name == SENDING_CALL))
        if WARM_UP in vars(worker):
            setattr(worker, WARM_UP, _then_shorten_waits(vars(worker)[WARM_UP]))


def check_ops() -> None:
    """Raises the first error that kernels of finished steps have recorded, here or in earlier pipeline stages."""
    for manager in live_managers:
        manager.check()
    for stage in live_stages:
        stage.check()


def _checked(call: Callable[..., Any], *, sends: bool = False) -> Callable[..., Any]:
    """Wraps a worker's call so that it raises instead of handing out tokens of a failed step.

    A replayed graph runs no Python of ours. So failures are looked for here, once the tokens are on the host: the
    step's kernels have ended by then.

    Args:
        call: the worker's. sends: the next pipeline stage waits for what it sends; after an error it is told.
    """

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with dead_ranks_named():
                output = call(self, *args, **kwargs)
        except BaseException as error:
            # whatever failed, a layer may have dispatched and not combined
            for manager in live_managers:
                manager.close_open_steps()
            if sends and isinstance(error, Exception):
                for stage in live_stages:
                    stage.tell(error)
            raise
        get_output = getattr(type(output), "get_output", None)
        if get_output is None:
            check_ops()
            return output
        # a reference to itself would keep the step's tensors alive until garbage collection
        reference = weakref.ref(output)

        def get_checked_output(*args: Any, **kwargs: Any) -> Any:
            result = get_output(reference(), *args, **kwargs)
            check_ops()
            return result

        output.get_output = get_checked_output
        return output

    return checked


def _then_shorten_waits(warm_up: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the worker's warm-up, after which ranks no longer differ by minutes: waits get the time-out of a step."""

    @functools.wraps(warm_up)
    def warm_up_and_shorten(self: Any, *args: Any, **kwargs: Any) -> Any:
        with dead_ranks_named():
            result = warm_up(self, *args, **kwargs)
        for manager in live_managers:
            manager.end_warm_up(env.TIMEOUT_SECS.get())
        return result

    return warm_up_and_shorten
