"""Ctrl-C while something runs that must not stop in the middle."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ep_a2a.interrupts import interrupts_held


@pytest.fixture
def other_thread() -> Iterator[None]:
    """A thread that does not block SIGINT, like those that numpy and torch start."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.fixture
def handler() -> Iterator[Callable[..., object]]:
    """Python's own handler of SIGINT, whatever the runner of the tests has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """Returns once the interpreter has taken note; it calls the handler before its next instructions."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    os.kill(os.getpid(), signal.SIGINT)
    os.read(reading, 1)
    signal.set_wakeup_fd(before)
    os.close(reading)
    os.close(writing)


@pytest.mark.usefixtures("other_thread")
def test_no_thread_lets_an_interrupt_through(handler: Callable[..., object]) -> None:
    ended = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with interrupts_held():
            interrupt()
            ended = True
        pytest.fail("the interrupt was lost")
    assert ended
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("other_thread", "handler")
def test_the_outermost_of_nested_holds_lets_it_through() -> None:
    ended = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():  # noqa: PT012
        with interrupts_held():
            interrupt()
        ended = True
    assert ended


def test_nothing_comes_where_nothing_came(handler: Callable[..., object]) -> None:
    with interrupts_held():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("other_thread", "handler")
def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("handler")
def test_a_thread_may_hold_them_too() -> None:
    """Python runs handlers in the main thread alone, so nothing stops another thread anyway."""

    def hold() -> str:
        with interrupts_held():
            return "held"

    with ThreadPoolExecutor() as executor:
        assert executor.submit(hold).result() == "held"
