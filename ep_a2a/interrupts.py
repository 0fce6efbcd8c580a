"""Holds back Ctrl-C while something runs that must not stop in the middle."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds back SIGINT meanwhile; one that has come is raised again at the end.

    Processes that are started meanwhile never see SIGINT, unless they unblock it: they inherit the mask of this thread.
    """
    with _handler_held():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _handler_held() -> Iterator[None]:
    """Keeps the handler of SIGINT from being called meanwhile.

    The mask of one thread does not do that: the system hands the signal to a thread that does not block it, such as one
    of numpy's, and Python then calls the handler in the main thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    # Python calls handlers in the main thread only, and only those that it has set itself.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came.is_set():
            signal.raise_signal(signal.SIGINT)
