"""Bodies of the tests of ranks that are killed from outside while they wait, on CPU and on GPUs alike.

What a kernel does cannot be interrupted at a chosen place on a GPU. But a rank waits for certain where the others come
only when it is dead; another process kills it there.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ep_a2a.errors import RankTimeoutError
from ep_a2a.kernels import primitives
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.testing import RankContext, RankFailure, RankPool
from tests.cases.fault_cases import (
    LOCAL_SECS,
    SLACK_SECS,
    TIMEOUT_SECS,
    VICTIM,
    close_secs,
    echo_of,
    settle,
    steps_until_error,
    told_by,
)
from tests.cases.op_cases import Case, Step, make_inputs, make_op, run_step, same_bits
from tests.cases.op_checks import raised, synchronize
from tests.replay import CapturedStep
from tests.shared_files import files_of
from tests.waiting import await_file, await_until, happens

LOW_LATENCY, BULK = 128, 0
GPU_TIMEOUT_SECS = 3.0
SECS_INTO_WAIT = 1.5
"""On a GPU, from before a call of the rank that dies to its death: what it sends has gone, and it has not given up."""
WAITS, DEAD = "waits", "dead"
"""Files that say that the rank that dies waits, and that it is dead."""
VICTIM_SECS = 60.0
"""Bound of the wait in which a rank is killed: it must not give up before."""
NUM_QUEUED_REPLAYS = 3


@dataclass(frozen=True)
class Fault:
    """A rank that is killed in a call of its second step, and the calls in which its peers may learn of it.

    Attributes:
        call: "dispatch" or "combine", made by the rank itself; "replay", of a graph with both.
        errors: calls of survivors, counted from that step. Later ones where the rank's rows had been sent.
    """

    call: str
    flagged_max_tokens: int
    errors: tuple[str, ...]


OUTSIDE_FAULTS = {
    "dispatch": Fault("dispatch", BULK, ("dispatch 0", "combine 0")),
    "low-latency dispatch": Fault("dispatch", LOW_LATENCY, ("dispatch 0", "combine 0")),
    "combine": Fault("combine", LOW_LATENCY, ("combine 0", "dispatch 1")),
    "replay": Fault("replay", LOW_LATENCY, ("replay",)),
}


def case_of(flagged_max_tokens: int, world_size: int = 3, **changes: Any) -> Case:
    """A step of a few tokens on each of three ranks, or two."""
    options = {"flagged_max_tokens": flagged_max_tokens}
    return Case(
        world_size=world_size,
        hidden_dim=32,
        num_experts=6,
        tokens=((4, 3, 5),),
        max_tokens=5,
        options=options,
        **changes,
    )


def timeout_of(device: torch.device) -> float:
    """Longer than a step takes there, in seconds."""
    return TIMEOUT_SECS if device.type == "cpu" else GPU_TIMEOUT_SECS


def ask_to_be_killed(folder: Path, device: torch.device) -> None:
    """Says when this process waits in the call that follows: what it sends has gone, and it has not given up."""
    waits = folder / WAITS
    if device.type == "cuda":
        # nothing tells how far a kernel is
        threading.Timer(SECS_INTO_WAIT, waits.touch).start()
        return

    def say_and_pause(secs: float) -> None:
        waits.touch()
        happens(lambda: False, within_secs=secs)

    primitives.time = SimpleNamespace(monotonic_ns=time.monotonic_ns, sleep=say_and_pause)  # type: ignore[assignment]


def kill_when_asked(process: int, folder: Path) -> None:
    """Kills a process, and says so when nothing of it is left, its kernels included."""
    await_file(folder / WAITS, patience_secs=VICTIM_SECS)
    os.kill(process, signal.SIGKILL)
    await_until(lambda: has_ended(process), "the end of a process that was killed")
    (folder / DEAD).touch()


def has_ended(process: int) -> bool:
    """Whether nothing is left of a process but its exit code."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def killed_in_a_call(context: RankContext, fault: Fault, case: Case, folder: str) -> None:
    """One rank is killed while it waits in a call; each of the others writes what it saw to a file."""
    marker, rank = Path(folder, DEAD), context.rank
    arena = Arena(context.group, context.device)
    op = make_op(context, case, arena)
    run_step(case, op, 0, context.device)
    settle(op)
    op.set_timeout(timeout_of(context.device) if rank != VICTIM else VICTIM_SECS)
    arena.rendezvous.barrier("before the kill")
    if rank == VICTIM:
        if fault.call == "dispatch":
            ask_to_be_killed(Path(folder), context.device)
        step = Step.dispatch(case, op, 1, context.device)
        settle(op)
        rows, weights, _, _ = step.before_combine()
        if fault.call == "combine":
            ask_to_be_killed(Path(folder), context.device)
        op.combine(rows, weights, step.ids)
        settle(op)
        raise AssertionError("this rank lives")
    seen = steps_until_error(case, op, 1, {fault.call: lambda: await_file(marker)})
    raised(RankTimeoutError, lambda: run_step(case, op, 2, context.device), f"rank {VICTIM}")
    _leave(op, arena, seen, Path(folder, f"{rank}.json"))


def killed_in_a_replay(context: RankContext, fault: Fault, case: Case, folder: str) -> None:
    """One rank is killed while it waits in a graph that it replays; the others have replays queued behind theirs."""
    marker, rank, device = Path(folder, DEAD), context.rank, context.device
    arena = Arena(context.group, device)
    op = make_op(context, case, arena)
    mine = make_inputs(case, 0, rank)
    x, ids, results = mine.tokens.to(device), mine.ids.to(device), []

    def body(call: Callable[[Callable[[], None]], None]) -> None:
        rows, *_ = op.dispatch(x, None, None, ids)
        results.append(op.combine(rows, None, ids)[0])

    body(lambda work: work())
    captured = CapturedStep(op, body)
    for number in range(2):
        captured.replay()
        synchronize(context)
        same_bits(results[-1][: len(x)], echo_of(case, 0, rank), f"replay {number}")
    settle(op)
    op.set_timeout(timeout_of(device) if rank != VICTIM else VICTIM_SECS)
    arena.rendezvous.barrier("before the kill")
    if rank == VICTIM:
        ask_to_be_killed(Path(folder), context.device)
        captured.replay()
        settle(op)
        raise AssertionError("this rank lives")
    await_file(marker)
    start = time.monotonic()
    for _ in range(NUM_QUEUED_REPLAYS):
        captured.replay()
    synchronize(context)
    seen = told_by(raised(RankTimeoutError, op.check), "replay", start)
    # those behind the one that failed have received nothing
    assert op.recv_counts.tolist() == [0] * context.world_size
    _leave(op, arena, seen, Path(folder, f"{rank}.json"))


def _leave(op: EpDispatchCombineOp, arena: Arena, seen: dict[str, Any], report: Path) -> None:
    """The op stays failed and closes alone; the rest of the report."""
    raised(RankTimeoutError, op.check, f"rank {VICTIM}")
    seen["close_secs"] = close_secs(op, arena)
    seen["files"] = files_of(os.getpid())
    report.write_text(json.dumps(seen))


def process_of(context: RankContext) -> int:
    return os.getpid()


def kill_and_look(fault: Fault, world_size: int, device: str, folder: Path) -> None:
    """Runs a fault in a pool of its own: what each survivor saw, and that no process is left."""
    weights = {} if fault.call != "replay" else {"with_weights": False, "combine_weights": False}
    case = case_of(fault.flagged_max_tokens, world_size, **weights)
    body = killed_in_a_replay if fault.call == "replay" else killed_in_a_call
    # under MPS the survivors would lose their contexts with the dead rank's
    with (
        RankPool(world_size, device=device, timeout_secs=120, grace_secs=60, mps=False) as pool,
        ThreadPoolExecutor(1) as killer,
    ):
        processes = pool.run(process_of)
        killing = killer.submit(kill_when_asked, processes[VICTIM], folder)
        with pytest.raises(RankFailure) as caught:
            pool.run(body, fault, case, str(folder))
        killing.result()
    assert sorted(caught.value.tracebacks) == [VICTIM], str(caught.value)
    assert "exit code -9" in caught.value.tracebacks[VICTIM]
    for rank in set(range(world_size)) - {VICTIM}:
        seen = json.loads((folder / f"{rank}.json").read_text())
        assert seen["call"] in fault.errors
        assert seen["missing"] == [VICTIM]
        assert seen["secs"] < timeout_of(torch.device(device)) + SLACK_SECS
        assert seen["close_secs"] < LOCAL_SECS
        assert seen["files"] == []
    # with a process its context on the GPU has gone
    assert not [process for process in processes if Path(f"/proc/{process}").exists()]
