"""Bodies of the tests of faults of real processes, on CPU and on GPUs; tests/simulator has faults inside of kernels."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ep_a2a import clock
from ep_a2a.errors import EpA2AError, RankTimeoutError
from ep_a2a.kernels import primitives
from ep_a2a.memory import arena as arena_module
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.ops.failures import check_peers
from ep_a2a.testing import RankContext, RankFailure, RankPool
from tests.cases.op_cases import Case, Step, built_op, make_inputs, make_op, run_step
from tests.cases.op_checks import raised, synchronize
from tests.replay import CapturedStep
from tests.shared_files import files_of
from tests.waiting import await_file, await_until, happens

VICTIM = 1
LOW_LATENCY, BULK = 128, 0
TIMEOUT_SECS = 5.0
"""Longer than a step of three interpreted ranks takes that start together."""
SLACK_SECS = 10.0
"""What a loaded machine may add to the op's timeout."""
LOCAL_SECS = 30.0
"""A close of long patience that waits for a rank in vain takes longer than this, another one far less."""
VICTIM_SECS = 60.0
"""Bound of the wait in which a rank dies: it must not give up before."""
SECS_INTO_WAIT = 1.5
"""On a GPU, from the launch of the call in which a rank dies to its death: what it sends has gone."""
NUM_QUEUED_REPLAYS = 3
KILLS = {
    "dispatch": ("dispatch", BULK, ("dispatch 0", "combine 0")),
    "low-latency dispatch": ("dispatch", LOW_LATENCY, ("dispatch 0", "combine 0")),
    "combine": ("combine", LOW_LATENCY, ("combine 0", "dispatch 1")),
    "replay": ("replay", LOW_LATENCY, ("replay",)),
}
"""(the call in which a rank dies, flagged_max_tokens, the calls in which its peers may learn of it).

A replay is of a graph of both calls. Peers learn of it later where the rank's rows had been sent.
"""


def case_of(flagged_max_tokens: int, world_size: int = 3, **changes: Any) -> Case:
    """A step of a few tokens on each of three ranks, or two."""
    options = {"flagged_max_tokens": flagged_max_tokens}
    sizes = {"hidden_dim": 32, "num_experts": 6, "tokens": ((4, 3, 5),), "max_tokens": 5}
    return Case(world_size=world_size, options=options, **sizes, **changes)


def settle(op: EpDispatchCombineOp) -> None:
    """Waits for what has been launched, and raises what it has recorded."""
    if op.device.type == "cuda":
        torch.cuda.synchronize(op.device)
    op.check()


def settled_step(
    case: Case, op: EpDispatchCombineOp, number: int, before_combine: Callable[[], None] = lambda: None
) -> None:
    """A step whose failures are raised before its results are compared with the oracle."""
    step = Step.dispatch(case, op, number, op.device)
    settle(op)
    step.check_dispatched()
    before_combine()
    step.combine(lambda: settle(op))


def steps_until_error(case: Case, op: EpDispatchCombineOp, before: dict[str, Callable[[], None]]) -> dict[str, Any]:
    """Goes on with steps until a call fails: which one, whom it names, after how long. What it does is checked."""
    for number in range(2):
        call = "dispatch"
        try:
            before.pop(call, lambda: None)()
            start = clock.now()
            step = Step.dispatch(case, op, 1 + number, op.device)
            settle(op)
            step.check_dispatched()
            call = "combine"
            before.pop(call, lambda: None)()
            start = clock.now()
            step.combine(lambda: settle(op))
        except RankTimeoutError as error:
            return told_by(error, f"{call} {number}", start)
    raise AssertionError("no rank was missed")


def told_by(error: EpA2AError, call: str, start: float) -> dict[str, Any]:
    """What a rank has seen: the call that failed, whom its error names, seconds since `start`."""
    assert isinstance(error, RankTimeoutError)
    missing, late = list(error.missing_ranks), list(error.late_ranks)
    return {"call": call, "missing": missing, "late": late, "secs": clock.now() - start}


def timed(work: Callable[[], Any]) -> float:
    start = clock.now()
    work()
    return clock.now() - start


def store_of(is_host: bool, path: Path) -> dist.TCPStore:
    """A store that one rank holds; the others learn of it by a file."""
    if is_host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
        return store
    await_file(path)
    return dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False, wait_for_workers=False)


# --- SIGKILL ---


def killed(context: RankContext, case: Case, call: str, folder: str) -> None:
    """One rank dies where it waits in a call; the others come to it then, and each writes down what it saw."""
    rank, device = context.rank, context.device
    arena = Arena(context.group, device)
    op = make_op(context, case, arena)
    if call == "replay":
        replay = captured_step(context, case, op)
    else:
        run_step(case, op, 0, device)
    settle(op)
    victim = arena.rendezvous.exchange("before the kill", os.getpid())[VICTIM]
    op.set_timeout(VICTIM_SECS if rank == VICTIM else TIMEOUT_SECS)

    def await_the_end() -> None:
        await_until(lambda: has_ended(victim), "the end of a process", VICTIM_SECS)

    if rank == VICTIM:
        step = Step.dispatch(case, op, 1, device) if call == "combine" else None
        settle(op)
        die_in_the_first_wait()
        if step is not None:
            op.combine(step.before_combine()[0], None, step.ids)
        else:
            replay() if call == "replay" else Step.dispatch(case, op, 1, device)
        # on a GPU the call waits for those who await this end
        happens(torch.cuda.current_stream(device).query, SECS_INTO_WAIT)
        os.kill(os.getpid(), signal.SIGKILL)
    if call == "replay":
        await_the_end()
        start = clock.now()
        for _ in range(NUM_QUEUED_REPLAYS):
            replay()
        synchronize(context)
        seen = told_by(raised(RankTimeoutError, op.check), call, start)
        # those behind the one that failed have received nothing
        assert op.recv_counts.tolist() == [0] * context.world_size
    else:
        seen = steps_until_error(case, op, {call: await_the_end})
        raised(RankTimeoutError, lambda: run_step(case, op, 2, device), f"rank {VICTIM}")
    # the op stays failed and closes alone
    raised(RankTimeoutError, op.check, f"rank {VICTIM}")
    with mock.patch.object(arena_module, "CLOSE_PATIENCE_SECS", 2 * LOCAL_SECS):
        seen["close_secs"] = timed(op.close) + timed(arena.close)
    seen["files"] = files_of(os.getpid())
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))


def captured_step(context: RankContext, case: Case, op: EpDispatchCombineOp) -> Callable[[], None]:
    """Replays a captured step whose experts return what they get; it has done so once."""
    x, _, _, ids = make_inputs(case, 0, context.rank).on(context.device)

    def body(_: Callable[[Callable[[], None]], None]) -> None:
        op.combine(op.dispatch(x, None, None, ids)[0], None, ids)

    body(lambda work: work())
    captured = CapturedStep(op, body)
    captured.replay()
    return captured.replay


def die_in_the_first_wait() -> None:
    """Kills this process when an interpreted kernel first waits."""
    dying = SimpleNamespace(monotonic_ns=time.monotonic_ns, sleep=lambda _: os.kill(os.getpid(), signal.SIGKILL))
    primitives.time = dying  # type: ignore[assignment]


def has_ended(process: int) -> bool:
    """Whether nothing is left of a process but its exit code."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def process_of(context: RankContext) -> int:
    return os.getpid()


def kill_and_look(kill: str, world_size: int, device: str, folder: Path) -> None:
    """Runs one of KILLS in a pool of its own: what each survivor saw, and that no process is left."""
    call, flagged_max_tokens, errors = KILLS[kill]
    weights = {"with_weights": False, "combine_weights": False}
    case = case_of(flagged_max_tokens, world_size, **weights)
    # under MPS the survivors would lose their contexts with the dead rank's
    with RankPool(world_size, device=device, timeout_secs=120, grace_secs=60, mps=False) as pool:
        processes = pool.run(process_of)
        with pytest.raises(RankFailure) as caught:
            pool.run(killed, case, call, str(folder))
    assert sorted(caught.value.tracebacks) == [VICTIM], str(caught.value)
    assert "exit code -9" in caught.value.tracebacks[VICTIM]
    for rank in set(range(world_size)) - {VICTIM}:
        seen = json.loads((folder / f"{rank}.json").read_text())
        assert seen["call"] in errors
        assert (seen["missing"], seen["files"]) == ([VICTIM], [])
        assert seen["secs"] < TIMEOUT_SECS + SLACK_SECS
        assert seen["close_secs"] < LOCAL_SECS
    # with a process its context on the GPU has gone
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]


# --- SIGSTOP ---


def stopped_for_long(context: RankContext, case: Case, before: str, folder: str) -> dict[str, Any]:
    """A rank stops before a call until the others have given up: all name it, itself too; reset makes the op usable."""
    with built_op(context, case) as op:
        run_step(case, op, 0, context.device)
        op.set_timeout(TIMEOUT_SECS)
        process = op.arena.rendezvous.exchange("before the stop", os.getpid())[VICTIM]
        goes_on = Path(folder, "goes on")
        if context.rank == VICTIM:
            seen = stop_until_let_go(case, op, before, goes_on)
        else:
            seen = steps_until_error(case, op, {})
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
    with built_op(context, case) as op:
        run_step(case, op, 0, context.device)
        settle(op)
        check_peers(op)
        op.set_timeout(timeout_secs)
        op.arena.rendezvous.barrier("a step that went well")
        if context.rank == VICTIM:

            def step_alone() -> None:
                Step.dispatch(case, op, 1, op.device)
                settle(op)

            raised(RankTimeoutError, step_alone, "had not come when")
        op.arena.rendezvous.barrier("one rank has given up")
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
        if before == "dispatch":
            stop()
        settled_step(case, op, 1, stop if before == "combine" else lambda: None)
        run_step(case, op, 2, op.device)

    error = raised(RankTimeoutError, two_steps)
    goes_on.touch()
    return told_by(error, "any", clock.now())
