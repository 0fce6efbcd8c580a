"""Bodies of the tests of faults: processes that die or stop at a chosen place, and ranks that leave the order of calls.

Run on every rank, in the interpreter: a fault that is to come inside a kernel comes at a call of one of its functions.
Those at a place "before" a call run on GPUs too, as do all of tests/cases/outside_fault_cases.py.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from ep_a2a.errors import ConfigMismatchError, EpA2AError, HostMemoryError, RankTimeoutError
from ep_a2a.kernels import combine_send_kernels, ll_dispatch_kernels, primitives, send_kernels
from ep_a2a.memory import arena as arena_module
from ep_a2a.memory.arena import Arena, BlockSizes
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.ops.failures import check_peers
from tests.cases.op_cases import Case, Step, make_inputs, make_op, run_case, run_step, same_bits
from tests.cases.op_checks import raised
from tests.shared_files import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ep_a2a.ops import EpDispatchCombineOp
    from ep_a2a.testing import RankContext

VICTIM = 1
TIMEOUT_SECS = 5.0
"""Longer than a step of three interpreted ranks takes that start together."""
SLACK_SECS = 10.0
"""What a loaded machine may add to the op's timeout."""
SHORT_STOP_SECS = 1.5
LATE_SECS = 1.5
MARKER_TIMEOUT_SECS = 60.0
LOCAL_SECS = 30.0
"""A close under `patient_closes` that waits for a rank in vain takes longer than this, another one far less."""

Place = tuple[str, Any, int]
"""A call of an op, and in it a device function and which of its calls in this process."""
ROW_OF_DISPATCH = {0: send_kernels.send_payload, 128: ll_dispatch_kernels.push_row}


def place_of(name: str, flagged_max_tokens: int) -> Place:
    """Where a fault comes: "before dispatch", "sending" or "waiting" in a call, or "before combine"."""
    what, _, call = name.rpartition(" ")
    sends = ROW_OF_DISPATCH[flagged_max_tokens] if call == "dispatch" else combine_send_kernels.push_block
    # the second row: the first one has gone; the third pause of a wait whose end cannot come
    return call, *{"before": (None, 0), "sending": (sends, 2), "waiting in": (primitives.pause, 3)}[what]


@contextlib.contextmanager
def at_call(function: Any, number: int, fault: Callable[[], None]) -> Iterator[None]:
    """Within, this process has a fault right before its `number`-th call of a device function."""
    original, calls = function.python, itertools.count(1)

    def with_fault(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            fault()
        return original(*args, **kwargs)

    function.python = with_fault
    try:
        yield
    finally:
        function.python = original
    if next(calls) <= number:
        raise AssertionError(f"{function.fn.__name__} was called fewer than {number} times")


def step_with_fault(case: Case, op: EpDispatchCombineOp, number: int, place: Place, fault: Callable[[], None]) -> None:
    """A step of the rank that has the fault; what survives it is checked against the oracle."""
    call, function, count = place
    around = {call: functools.partial(at_call, function, count, fault)} if function is not None else {}
    if function is None and call == "dispatch":
        fault()
    with around.get("dispatch", contextlib.nullcontext)():
        step = Step.dispatch(case, op, number, op.device)
    settle(op)
    step.check_dispatched()
    if function is None and call == "combine":
        fault()
    with around.get("combine", contextlib.nullcontext)():
        combine(step)


def combine(step: Step) -> None:
    """A combine whose failure is raised before its result is looked at."""
    rows, weights, expected, sums = step.before_combine()
    got = step.op.combine(rows, weights, step.ids)
    settle(step.op)
    step.check_combined(got, expected, sums)


def settle(op: EpDispatchCombineOp) -> None:
    """Waits for what has been launched, and raises what it has recorded."""
    if op.device.type == "cuda":
        torch.cuda.synchronize(op.device)
    op.check()


def steps_until_error(
    case: Case, op: EpDispatchCombineOp, first: int, before: dict[str, Callable[[], None]]
) -> dict[str, Any]:
    """Goes on with steps until a call fails: which one, whom it names, after how long. What it does is checked."""
    for number in (first, first + 1):
        call, start = "dispatch", time.monotonic()
        try:
            before.pop("dispatch", _nothing)()
            start = time.monotonic()
            step = Step.dispatch(case, op, number, op.device)
            settle(op)
            step.check_dispatched()
            before.pop("combine", _nothing)()
            call, start = "combine", time.monotonic()
            combine(step)
        except RankTimeoutError as error:
            behind = sorted(kind for kind, epochs in error.seen.items() if epochs[VICTIM] != error.wanted)
            return told_by(error, f"{call} {number - first}", start) | {"behind": behind}
    raise AssertionError("no rank was missed")


def told_by(error: EpA2AError, call: str, start: float) -> dict[str, Any]:
    """What a rank has seen: the call that failed, whom its error names, seconds since `start`."""
    assert isinstance(error, RankTimeoutError)
    missing, late = list(error.missing_ranks), list(error.late_ranks)
    return {"call": call, "missing": missing, "late": late, "secs": time.monotonic() - start}


def _nothing() -> None:
    pass


def timed(work: Callable[[], Any]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def patient_closes() -> contextlib.AbstractContextManager[Any]:
    """Within, a close waits for other ranks for so long that it can be told from one that waits for nobody."""
    return mock.patch.object(arena_module, "CLOSE_PATIENCE_SECS", 2 * LOCAL_SECS)


def close_secs(op: EpDispatchCombineOp, arena: Arena) -> float:
    """Closes both under `patient_closes`."""
    with patient_closes():
        return timed(op.close) + timed(arena.close)


# --- kill -9 ---


def killed(context: RankContext, case: Case, place_name: str, folder: str) -> None:
    """One rank kills itself; each of the others writes what it saw to a file, since a pool with a dead rank fails."""
    marker = Path(folder, "dying")
    arena = Arena(context.group, context.device)
    op = make_op(context, case, arena)
    run_step(case, op, 0, context.device)
    op.set_timeout(TIMEOUT_SECS)
    arena.rendezvous.barrier("before the kill")

    def die() -> None:
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if context.rank == VICTIM:
        step_with_fault(case, op, 1, place_of(place_name, case.options["flagged_max_tokens"]), die)
        raise AssertionError("this rank lives")
    # a rank dies while it waits only if what it waits for does not come
    waits, _, call = place_name.rpartition(" ")
    seen = steps_until_error(case, op, 1, {call: lambda: await_file(marker)} if waits == "waiting in" else {})
    raised(RankTimeoutError, op.check, f"rank {VICTIM}")
    raised(RankTimeoutError, lambda: run_step(case, op, 2, context.device), f"rank {VICTIM}")
    seen["close_secs"] = close_secs(op, arena)
    seen["files"] = files_of(os.getpid())
    Path(folder, f"{context.rank}.json").write_text(json.dumps(seen))


def store_of(is_host: bool, path: Path) -> dist.TCPStore:
    """A store that one rank holds; the others learn of it by a file."""
    if is_host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    await_file(path)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False, wait_for_workers=False)


def await_file(*paths: Path) -> None:
    """Waits until one of the files exists."""
    deadline = time.monotonic() + MARKER_TIMEOUT_SECS
    while not any(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise AssertionError(f"no {' or '.join(map(str, paths))}")
        time.sleep(0.01)


# --- SIGSTOP ---


def stop_itself(secs: float, marker: Path | None = None) -> None:
    """Stops this process; a child of it lets it go on, again and again since it may be faster."""
    if marker is not None:
        marker.touch()
    start = time.monotonic()
    script = f"while sleep {secs} && kill -CONT {os.getpid()}; do :; done"
    child = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert time.monotonic() - start >= secs


def stopped_for_a_while(context: RankContext, case: Case, place_names: tuple[str, ...], folder: str) -> None:
    """A rank stops for less than the timeout: nobody notices, all results are right."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena, timeout_secs=TIMEOUT_SECS + SLACK_SECS)
        for number, name in enumerate(place_names):
            marker = Path(folder, f"stops {number}")
            if context.rank == VICTIM:
                place = place_of(name, case.options["flagged_max_tokens"])
                step_with_fault(case, op, number, place, lambda marker=marker: stop_itself(SHORT_STOP_SECS, marker))
            else:
                if name.startswith("waiting"):
                    await_file(marker)
                run_step(case, op, number, context.device)
            settle(op)


def stopped_for_long(context: RankContext, case: Case, place_name: str, folder: str) -> dict[str, Any]:
    """A rank stops until the others have given up: all name it, itself too; reset makes the op usable."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        op.set_timeout(TIMEOUT_SECS)
        process = arena.rendezvous.exchange("before the stop", os.getpid())[VICTIM]
        goes_on = Path(folder, "goes on")
        if context.rank == VICTIM:
            seen = stop_until_let_go(case, op, place_name, goes_on)
        else:
            seen = steps_until_error(case, op, 1, {})
            Path(folder, f"gave up {context.rank}").touch()
            for other in set(range(context.world_size)) - {VICTIM}:
                await_file(Path(folder, f"gave up {other}"))
            # again and again: it may be about to stop only now
            while not goes_on.exists():
                os.kill(process, signal.SIGCONT)
                time.sleep(0.2)
        op.reset()
        for number in range(3, 5):
            run_step(case, op, number, context.device)
        return seen


def told_of_a_failure(context: RankContext, case: Case, timeout_secs: float) -> list[int]:
    """One rank gives up in a step that the others have not begun: they are told, though no kernel of theirs sees it."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        settle(op)
        check_peers(op)
        op.set_timeout(timeout_secs)
        arena.rendezvous.barrier("a step that went well")
        if context.rank == VICTIM:

            def step_alone() -> None:
                Step.dispatch(case, op, 1, op.device)
                settle(op)

            raised(RankTimeoutError, step_alone, "had not come when")
        arena.rendezvous.barrier("one rank has given up")
        if context.rank != VICTIM:
            op.check()
        error = raised(
            RankTimeoutError, lambda: check_peers(op), "had not come when" if context.rank == VICTIM else "reported it"
        )
        op.reset()
        check_peers(op)
        run_step(case, op, 2, context.device)
        return [list(error.missing_ranks), list(error.late_ranks)]


def stop_until_let_go(case: Case, op: EpDispatchCombineOp, place_name: str, goes_on: Path) -> dict[str, Any]:
    """The rank that stops: its step may end, since it has what it needs, but not the one after it."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        goes_on.touch()

    def two_steps() -> None:
        step_with_fault(case, op, 1, place_of(place_name, case.options["flagged_max_tokens"]), stop)
        run_step(case, op, 2, op.device)

    error = raised(RankTimeoutError, two_steps)
    return told_by(error, "any", time.monotonic())


# --- ranks that leave the order of calls ---


class ModelError(Exception):
    """What a layer may raise between dispatch and combine."""


def raises_between(context: RankContext, case: Case) -> dict[str, Any]:
    """An exception leaves op and arena on one rank, which waits for nobody; the others name it, and all begin anew."""
    seen: dict[str, Any] = {}
    try:
        with (
            patient_closes(),
            Arena(context.group, context.device) as arena,
            make_op(context, case, arena, index=0) as op,
        ):
            run_step(case, op, 0, context.device)
            op.set_timeout(TIMEOUT_SECS)
            arena.rendezvous.barrier("before the exception")
            if context.rank == VICTIM:
                step = Step.dispatch(case, op, 1, context.device)
                step.check_dispatched()
                start = time.monotonic()
                raise ModelError
            seen = steps_until_error(case, op, 1, {})
            start = time.monotonic()
    except ModelError:
        assert context.rank == VICTIM
    seen["close_secs"] = time.monotonic() - start
    run_case(context, case)
    return seen


def skips_a_step(context: RankContext, case: Case) -> dict[str, Any]:
    """A rank leaves a whole step out: its next one takes that one's place, so it is missed at the end only."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        op.set_timeout(TIMEOUT_SECS)
        arena.rendezvous.barrier("before the step that one leaves out")
        for number in (1, 2, 3) if context.rank != VICTIM else (2, 3):
            # experts that return what they get: a token comes back once for each rank that it went to, whatever
            # step the others are in
            start = time.monotonic()
            try:
                check_echo(case, op, number, context.rank)
            except RankTimeoutError as error:
                seen = told_by(error, f"step {number}", start)
                break
        else:
            seen = {"call": "none"}
        arena.rendezvous.barrier("all have seen it")
        op.reset()
        run_step(case, op, 4, context.device)
        return seen


def check_echo(case: Case, op: EpDispatchCombineOp, number: int, rank: int) -> None:
    step = Step.dispatch(case, op, number, op.device)
    op.check()
    rows = step.got[0]
    result, _ = op.combine(rows, None, step.ids)
    op.check()
    same_bits(result[: len(step.ids)], echo_of(case, number, rank), "echo")


def echo_of(case: Case, number: int, rank: int) -> torch.Tensor:
    """A step's result [T, H] where experts return what they get: each token times the ranks that it went to."""
    mine = make_inputs(case, number, rank)
    owners = mine.ids.long() // (case.num_experts // case.world_size)
    num_owners = torch.tensor([len(set(row)) for row in owners.tolist()])
    return (mine.tokens.float() * num_owners[:, None]).to(mine.tokens.dtype)


def store_dies(context: RankContext, folder: str) -> None:
    """The rank that holds the group's store dies: the others get an error at once, from a meeting and from close."""
    meeting = Rendezvous(context.group)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if context.rank == VICTIM else None
    port = meeting.exchange("port", None if store is None else store.port)[VICTIM]
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    arena = Arena(context.group, context.device)
    arena.acquire("key", 0, BlockSizes(512, {}, 64, {}, record_words=8))
    arena.rendezvous._store = store
    arena.rendezvous.barrier("through the store that is to die")
    meeting.barrier("all have been answered")
    if context.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = {"barrier": timed(lambda: meet_without_store(arena))}
    with patient_closes():
        seen["close"] = timed(arena.close)
    Path(folder, f"{context.rank}.json").write_text(json.dumps(seen))


def meet_without_store(arena: Arena) -> None:
    error = raised(RankTimeoutError, lambda: arena.rendezvous.barrier("after"), "the store of")
    assert isinstance(error, RankTimeoutError)
    assert error.missing_ranks == (VICTIM,)


# --- memory that is not to be had ---


def no_memory(context: RankContext, case: Case, kind: str, number: int) -> dict[str, Any]:
    """One rank's `number`-th allocation for an op fails: every rank gets an error at once; the next op is built."""
    with Arena(context.group, context.device) as arena:
        with failing(kind, number) if context.rank == VICTIM else contextlib.nullcontext():
            start = time.monotonic()
            error = raised(EpA2AError, lambda: make_op(context, case, arena))
            seen = {"kind": type(error).__name__, "text": str(error), "secs": time.monotonic() - start}
        expected = HostMemoryError if context.rank == VICTIM else ConfigMismatchError
        assert isinstance(error, expected), error
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        # what the failed op had got serves this one
        assert len(arena._shared_blocks) == 1
        shared = arena._shared_blocks[op.index]
        for blocks in (*shared.symmetric.values(), *shared.local.values()):
            assert len(blocks) == 1
        return seen


@contextlib.contextmanager
def failing(kind: str, number: int) -> Iterator[None]:
    """Within, this process' `number`-th allocation of a kind fails as it does where there is no memory."""
    owner, name, error = {
        "shared": (os, "posix_fallocate", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        "local": (arena_module, "zeros_outside_pools", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
    }[kind]
    original, calls = getattr(owner, name), itertools.count(1)

    def fail(*args: Any) -> Any:
        if next(calls) == number:
            raise error
        return original(*args)

    setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, original)
