"""What vLLM's micro-batches (dual batch overlap, DBO) lack: a step that fails in one thread fails in all, and ends; and
each micro-batch has attention metadata of its own.

vLLM runs each micro-batch in a thread of its own. One thread works at a time: it hands over where the model
communicates, and waits until another one hands back. A thread that ends with an error never hands back, so the others
would wait for ever; the error itself would be lost.

vLLM (up to 0.33, PR #48659) keeps the metadata that FlashAttention's builder has made for the first micro-batch, and
gives the others the same with a block table of their own: the lengths of other requests.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

_errors: list[BaseException] = []
"""Errors of the step's micro-batches, the first one first."""


@functools.cache
def patch_micro_batches() -> None:
    """Patches `micro-batch-errors` and `micro-batch-metadata`. Idempotent."""
    from vllm.v1.worker import gpu_ubatch_wrapper
    from vllm.v1.worker.ubatching import UBatchContext
    from vllm.v1.worker.utils import AttentionGroup

    wrapper = gpu_ubatch_wrapper.UBatchWrapper
    _wrap(UBatchContext, "__exit__", _remembering)
    _wrap(UBatchContext, "_cpu_yield", _raising_errors_of_others)
    _wrap(wrapper, "_run_ubatches", _raising_the_first_error)
    _wrap(wrapper, "_capture_ubatches", _raising_the_first_error)
    _wrap(AttentionGroup, "get_metadata_builder", _building_anew)
    # the runner that vLLM has beside it from 0.30 on raises errors itself
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.gpu.ubatch_utils import UBatchRunner

        _wrap(UBatchRunner, "begin_capturable_run", _forgetting_errors)


def _wrap(owner: type, name: str, wrapped: Callable[..., Any]) -> None:
    setattr(owner, name, wrapped(getattr(owner, name)))


def _remembering(leave: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `UBatchContext.__exit__`, which wakes the next thread: by then the error is known."""

    @functools.wraps(leave)
    def __exit__(self: Any, kind: Any, error: BaseException | None, trace: Any) -> Any:
        if error is not None:
            _errors.append(error)
        return leave(self, kind, error, trace)

    return __exit__


def _raising_errors_of_others(hand_over: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `UBatchContext._cpu_yield`: nobody may wait for a thread that has ended, nor go on after it."""

    @functools.wraps(hand_over)
    def _cpu_yield(self: Any) -> None:
        _raise_first()
        hand_over(self)
        _raise_first()

    return _cpu_yield


def _raise_first() -> None:
    if _errors:
        raise _errors[0]


def _raising_the_first_error(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the call that starts and joins a step's threads, and makes a result of what those left that ended well."""

    @functools.wraps(run)
    def run_and_raise(*args: Any, **kwargs: Any) -> Any:
        _errors.clear()
        try:
            result = run(*args, **kwargs)
        finally:
            # in place of an error about results that are missing
            _raise_first()
        return result

    return run_and_raise


def _building_anew(get_builder: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `AttentionGroup.get_metadata_builder`: those of all micro-batches but the first reuse no metadata."""

    @functools.wraps(get_builder)
    def get_metadata_builder(self: Any, ubatch_id: int = 0) -> Any:
        builder = get_builder(self, ubatch_id)
        if ubatch_id:
            builder.supports_update_block_table = False
        return builder

    return get_metadata_builder


def _forgetting_errors(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def begin_anew(*args: Any, **kwargs: Any) -> Any:
        _errors.clear()
        return begin(*args, **kwargs)

    return begin_anew
