"""Bodies of the tests of faults of real processes, on CPU and on GPUs; tests/simulator has faults inside of kernels."""

import contextlib
import errno
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ep_a2a import clock
from ep_a2a.errors import ConfigMismatchError, EpA2AError, HostMemoryError, RankTimeoutError
from ep_a2a.kernels.layout import StepPhase
from ep_a2a.memory import arena as arena_module
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.ops.failures import check_peers
from ep_a2a.ops.staged import StagedEngine
from ep_a2a.testing import RankContext
from tests.cases.op_cases import Case, Step, arena_of, make_inputs, make_op, run_step
from tests.cases.op_checks import raised
from tests.waiting import await_file, await_until

VICTIM = 1
TIMEOUT_SECS = 5.0
"""Longer than a step of three interpreted ranks takes that start together."""
SLACK_SECS = 10.0
"""What a loaded machine may add to the op's timeout."""
SHORT_STOP_SECS = 1.5
LOCAL_SECS = 30.0
"""A close under `patient_closes` that waits for a rank in vain takes longer than this, another one far less."""


def step_with_fault(case: Case, op: EpDispatchCombineOp, number: int, call: str, fault: Callable[[], None]) -> None:
    """A step of the rank that has the fault before a call; what survives it is checked against the oracle."""
    if call == "dispatch":
        fault()
    step = Step.dispatch(case, op, number, op.device)
    settle(op)
    step.check_dispatched()
    if call == "combine":
        fault()
    combine(step)


def combine(step: Step) -> None:
    """A combine whose failure is raised before its result is looked at."""
    step.combine(lambda: settle(step.op))


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
        call, start = "dispatch", clock.now()
        try:
            before.pop("dispatch", _nothing)()
            start = clock.now()
            step = Step.dispatch(case, op, number, op.device)
            settle(op)
            step.check_dispatched()
            before.pop("combine", _nothing)()
            call, start = "combine", clock.now()
            combine(step)
        except RankTimeoutError as error:
            return told_by(error, f"{call} {number - first}", start)
    raise AssertionError("no rank was missed")


def told_by(error: EpA2AError, call: str, start: float) -> dict[str, Any]:
    """What a rank has seen: the call that failed, whom its error names, seconds since `start`."""
    assert isinstance(error, RankTimeoutError)
    missing, late = list(error.missing_ranks), list(error.late_ranks)
    return {"call": call, "missing": missing, "late": late, "secs": clock.now() - start}


def _nothing() -> None:
    pass


def timed(work: Callable[[], Any]) -> float:
    start = clock.now()
    work()
    return clock.now() - start


def patient_closes() -> contextlib.AbstractContextManager[Any]:
    """Within, a close waits for other ranks for so long that it can be told from one that waits for nobody."""
    return mock.patch.object(arena_module, "CLOSE_PATIENCE_SECS", 2 * LOCAL_SECS)


def close_secs(op: EpDispatchCombineOp, arena: Arena) -> float:
    """Closes both under `patient_closes`."""
    with patient_closes():
        return timed(op.close) + timed(arena.close)


def store_of(is_host: bool, path: Path) -> dist.TCPStore:
    """A store that one rank holds; the others learn of it by a file."""
    if is_host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    await_file(path)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False, wait_for_workers=False)


# --- SIGSTOP ---


def stop_itself(secs: float) -> None:
    """Stops this process; a child of it lets it go on, again and again since it may be faster."""
    start = clock.now()
    script = f"while sleep {secs} && kill -CONT {os.getpid()}; do :; done"
    child = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert clock.now() - start >= secs


def stopped_for_a_while(context: RankContext, case: Case) -> None:
    """A rank stops for less than the timeout before each call: nobody notices, all results are right."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena, timeout_secs=TIMEOUT_SECS + SLACK_SECS)
        for number, call in enumerate(("dispatch", "combine")):
            if context.rank == VICTIM:
                step_with_fault(case, op, number, call, lambda: stop_itself(SHORT_STOP_SECS))
            else:
                run_step(case, op, number, context.device)
            settle(op)


def stopped_for_long(context: RankContext, case: Case, before: str, folder: str) -> dict[str, Any]:
    """A rank stops until the others have given up: all name it, itself too; reset makes the op usable.

    before: the call before which it stops; "" stops it in the wait of a dispatch.
    """
    with arena_of(context, case) as arena:
        op = make_op(context, case, arena)
        run_step(case, op, 0, context.device)
        op.set_timeout(TIMEOUT_SECS)
        process = arena.rendezvous.exchange("before the stop", os.getpid())[VICTIM]
        goes_on = Path(folder, "goes on")
        if context.rank == VICTIM:
            seen = stop_until_let_go(case, op, before, goes_on)
        else:
            if not before:
                stop_in_a_wait(case, op, process, Path(folder, "stopped"))
            seen = steps_until_error(case, op, 1, {})
            Path(folder, f"gave up {context.rank}").touch()
            for other in set(range(context.world_size)) - {VICTIM}:
                await_file(Path(folder, f"gave up {other}"))

            def goes_on_when_told() -> bool:
                # again and again: it may be about to stop only now
                os.kill(process, signal.SIGCONT)
                return goes_on.exists()

            await_until(goes_on_when_told, f"rank {VICTIM} goes on")
        # the steps that follow may take any time
        op.set_timeout(op.config.timeout_secs)
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


def stop_until_let_go(case: Case, op: EpDispatchCombineOp, before: str, goes_on: Path) -> dict[str, Any]:
    """The rank that stops: its step may end, since it has what it needs, but not the one after it."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        goes_on.touch()

    def two_steps() -> None:
        step_with_fault(case, op, 1, before, stop)
        run_step(case, op, 2, op.device)

    error = raised(RankTimeoutError, two_steps)
    goes_on.touch()
    return told_by(error, "any", clock.now())


def stop_in_a_wait(case: Case, op: EpDispatchCombineOp, process: int, stopped: Path) -> None:
    """Returns when the victim, whose process this is, has been stopped in dispatch 1, which waits for this rank."""
    record = op.memory.peers.host_record

    def victim_waits() -> bool:
        if isinstance(op.engine, StagedEngine):
            return record.waits(VICTIM)
        # nothing else tells how far its kernels are
        return any(epochs[VICTIM] == case.epoch(1) for epochs in op.memory.epochs_seen(StepPhase.DISPATCH).values())

    if op.config.rank == 0:
        await_until(victim_waits, "a wait")
        os.kill(process, signal.SIGSTOP)
        await_until(lambda: record.is_stopped(VICTIM), "the stop")
        stopped.touch()
    await_file(stopped)


def echo_of(case: Case, number: int, rank: int) -> torch.Tensor:
    """A step's result [T, H] where experts return what they get: each token times the ranks that it went to."""
    mine = make_inputs(case, number, rank)
    owners = mine.ids.long() // (case.num_experts // case.world_size)
    num_owners = torch.tensor([len(set(row)) for row in owners.tolist()])
    return (mine.tokens.float() * num_owners[:, None]).to(mine.tokens.dtype)


# --- memory that is not to be had ---


def no_memory(context: RankContext, case: Case, kind: str, number: int) -> dict[str, Any]:
    """One rank's `number`-th allocation for an op fails: every rank gets an error at once; the next op is built."""
    with Arena(context.group, context.device) as arena:
        with failing(kind, number) if context.rank == VICTIM else contextlib.nullcontext():
            start = clock.now()
            error = raised(EpA2AError, lambda: make_op(context, case, arena))
            seen = {"kind": type(error).__name__, "text": str(error), "secs": clock.now() - start}
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
