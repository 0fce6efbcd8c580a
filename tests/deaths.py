"""Random kills and stops: ranks die at any place of a step, and every survivor must name exactly those that are gone.

`python -m tests.deaths --runs 200 --seed 1 --jobs 4` runs on CPU processes and prints a table. A rank dies, or stops
for good, at a random call of device code in a step that was measured before, or behind it. Or it dies at a meeting on
the host while the ranks build, reset or close. Those who survive write down whom their error names: the dead as
missing, or where nobody has died, the stopped as late. A stopped rank that no host hears is missing, too. A rank whose
fault was drawn for a place that it did not come to survives. One that is struck when the others have agreed already may
be named or not, but by all alike.

With `--device cuda` the ranks share a GPU where there are fewer, by time slices, and a thread of the rank strikes at a
random time of a step. With `--log FILE` each run is noted there, and the next call with the same file leaves it out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ep_a2a.errors import RankTimeoutError
from ep_a2a.kernels.portable import PortableFunction
from ep_a2a.memory import arena as arena_module
from ep_a2a.memory import host_record
from ep_a2a.memory.agreement import PATIENCE_SECS
from ep_a2a.memory.arena import Arena
from ep_a2a.memory.peers import SILENT_SECS
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing import RankFailure, RankPool
from tests.cases.fault_cases import await_file, settle
from tests.cases.op_cases import Case, Step, make_op, run_step
from tests.cases.staged_cases import node_arena, over_torch_distributed
from tests.messages import messages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ep_a2a.testing import RankContext

BOUND_SECS = 4.0
SLACK_SECS = 8.0
"""What a loaded machine may add."""
TO_ERROR_SECS = 0.5
"""From the verdict to the error that tells it, and from a death to where it is seen."""
TO_OTHER_HOSTS_SECS = 3.0
"""From a death to where other hosts have heard of it."""
MAX_STEPS = 4
PATHS = (
    "IntraNode",
    "InterNode",
    "InterNodeV1",
    "InterNodeV1LL",
    "AsyncLL",
    "InterNodeV1 by puts",
    "AsyncLL by puts",
    "InterNodeV1 over torch.distributed",
    "InterNodeV1LL over torch.distributed",
    "InterNodeV1 between hosts",
    "AsyncLL between hosts",
    "InterNodeV1 over torch.distributed between hosts",
    "InterNodeV1LL over torch.distributed between hosts",
)
BETWEEN_HOSTS = " between hosts"
"""Each virtual node has a record of its own, so its ranks hear of other nodes by the store only."""
PHASES = ("step", "step", "step", "build", "reset", "close")
MEETINGS = {"build": 9, "reset": 2, "close": 1}
"""Meetings of a phase, at one of which a rank dies."""
ON_HOST_SECS = 2.0
"""Within this a death is named by the ranks of its host."""
GPU_PATHS = PATHS[:5]
"""Ranks that share a GPU have no NVSHMEM and no NCCL."""
GPU_STEPS_SECS = 60.0
TRANSPORTS = {"by puts": "nvshmem", "over torch.distributed": "torch.distributed"}


@dataclass(frozen=True)
class Fault:
    """What happens to a rank: "kill" or "stop", at this share of the device calls of its step, 1 to 1.3 behind it.

    In other phases than "step", at this share of the meetings.
    """

    kind: str
    share: float


@dataclass(frozen=True)
class Run:
    """One run: a path of the rows, how calls are made, and the faults by rank."""

    path: str
    world_size: int
    flagged_max_tokens: int
    layout: str
    split: str
    faults: dict[int, Fault] = field(hash=False)
    device: str = "cpu"
    phase: str = "step"

    @property
    def case(self) -> Case:
        """The op of the run."""
        kernel, _, transport = self.path.removesuffix(BETWEEN_HOSTS).partition(" ")
        num_nodes = 1 if kernel == "IntraNode" else 3 if self.world_size == 3 else 2
        options: dict[str, Any] = {"flagged_max_tokens": self.flagged_max_tokens, "first_timeout_secs": 60.0}
        if transport:
            options["internode_transport"] = TRANSPORTS[transport]
        case = Case(
            world_size=self.world_size,
            hidden_dim=32,
            num_experts=2 * self.world_size,
            tokens=((4, 3, 5),),
            max_tokens=5,
            layout=self.layout,
            split=self.split,
            num_nodes=num_nodes,
            kernel=kernel,
            options=options,
        )
        return over_torch_distributed(case) if self.is_staged else case

    @property
    def is_on_one_host(self) -> bool:
        """Whether all ranks share a record."""
        return not self.path.endswith(BETWEEN_HOSTS)

    @property
    def is_staged(self) -> bool:
        """Whether the host moves rows between nodes."""
        return "torch.distributed" in self.path


def draw(seed: int, number: int, device: str = "cpu") -> Run:
    """The run of this number."""
    rng = random.Random(f"{seed} {number}")
    paths = PATHS if device == "cpu" else GPU_PATHS
    path, world_size = paths[number % len(paths)], rng.choice((3, 4))
    num_faults = rng.choice((1, 1, 2) if world_size == 3 else (1, 1, 2, 3))
    victims = sorted(rng.sample(range(world_size), num_faults))
    faults = {rank: Fault(rng.choice(("kill", "kill", "stop")), rng.random() * 1.3) for rank in victims}
    layouts = ("compact", "rank_major", "expert_major")
    others = rng.choice((0, 128)), rng.choice(layouts), rng.choice(("", "mixed"))
    phase = rng.choice(PHASES) if device == "cpu" else "step"
    if phase != "step":
        # a rank that is stopped is waited for until the bound of a meeting
        faults = {rank: Fault("kill", fault.share / 1.3) for rank, fault in faults.items()}
    return Run(path, world_size, *others, faults, device, phase)


def strike(sign: Path, kind: str) -> None:
    """Ends or stops this process, and leaves a sign of it."""
    sign.touch()
    os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


class FaultyCalls:
    """Counts this process' calls of device functions; `fault` comes at the call of number `at`."""

    def __init__(self, fault: Callable[[], None]) -> None:
        self.count, self.at = 0, -1
        original = PortableFunction.__call__

        def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                fault()
            return original(function, *args, **kwargs)

        PortableFunction.__call__ = counted  # type: ignore[method-assign]


def hosts_apart(ranks_per_host: int, rank: int) -> contextlib.AbstractContextManager[Any]:
    """Within, ranks of one virtual node only share a record."""
    return mock.patch.object(host_record, "host_identity", return_value=f"host {rank // ranks_per_host}")


def body(context: RankContext, run: Run, folder: str) -> None:
    """A rank of a run: steps until an error, or until its fault comes."""
    case, rank = run.case, context.rank
    is_apart = not run.is_on_one_host
    with hosts_apart(case.world_size // case.num_nodes, rank) if is_apart else contextlib.nullcontext():
        arena = node_arena(context, case.num_nodes) if run.is_staged else Arena(context.group, context.device)
    pids = arena.rendezvous.exchange("process numbers", os.getpid())
    if run.phase == "step":
        seen = seen_in_a_step(context, run, arena, folder)
    else:
        seen = seen_in_a_phase(context, run, arena, folder)
    Path(folder, f"{rank}.part").write_text(json.dumps(seen))
    Path(folder, f"{rank}.part").rename(Path(folder, f"{rank}.json"))
    for other in range(case.world_size):
        if other != rank:
            # it may be struck while this rank waits for it
            await_file(Path(folder, f"{other}.json"), Path(folder, f"struck {other}"))
    for other in run.faults:
        if Path(folder, f"struck {other}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[other], signal.SIGKILL)


def seen_in_a_phase(context: RankContext, run: Run, arena: Arena, folder: str) -> dict[str, Any]:
    """What this rank sees while ranks build, reset or close, and some of them die at a meeting."""
    case, fault = run.case, run.faults.get(context.rank)
    op = None if run.phase == "build" else make_op(context, case, arena)
    reset = None if op is None else op.reset
    work = {"build": lambda: make_op(context, case, arena), "reset": reset, "close": arena.close}[run.phase]
    arena.rendezvous.barrier("before the faults")
    if fault is not None:
        die_at_a_meeting(Path(folder, f"struck {context.rank}"), 1 + int(fault.share * MEETINGS[run.phase]))
    began = time.monotonic()
    with messages_of(arena_module.logger, logging.INFO) as texts:
        seen = named_by(lambda: [work()])
    seen["secs"] = time.monotonic() - began
    if run.phase == "close":
        # a close raises nothing, and says in the log who did not come
        absent, _, why = texts[0].partition(": ")[2].partition(":") if texts else ("", "", "")
        gone = [rank for rank in range(run.world_size) if str(rank) in absent]
        seen |= {"named": [gone, []], "text": why, "at": time.time()}
    return seen


def named_by(calls: Callable[[], Iterable[None]]) -> dict[str, Any]:
    """Makes calls until one fails: whom its error names, when, and seconds of the last call."""
    seen: dict[str, Any] = {"named": None}
    start = time.monotonic()
    try:
        for _ in calls():
            start = time.monotonic()
    except RankTimeoutError as error:
        seen = {"named": [error.missing_ranks, error.late_ranks], "text": str(error), "at": time.time()}
    return seen | {"secs": time.monotonic() - start}


def die_at_a_meeting(sign: Path, number: int) -> None:
    """Lets this process die before the exchange of this number from now on."""
    original, calls = Rendezvous.exchange, itertools.count(1)

    def exchange(meeting: Rendezvous, label: str, message: Any) -> list[Any]:
        if next(calls) == number:
            strike(sign, "kill")
        return original(meeting, label, message)

    Rendezvous.exchange = exchange  # type: ignore[method-assign]


def seen_in_a_step(context: RankContext, run: Run, arena: Arena, folder: str) -> dict[str, Any]:
    """What this rank sees in steps in which some ranks die or stop."""
    case, fault = run.case, run.faults.get(context.rank)
    op = make_op(context, case, arena)
    strike_here = functools.partial(strike, Path(folder, f"struck {context.rank}"), fault.kind if fault else "")
    calls = FaultyCalls(strike_here)
    run_step(case, op, 0, context.device)
    before, began = calls.count, time.monotonic()
    run_step(case, op, 1, context.device)
    num_calls, step_secs = calls.count - before, time.monotonic() - began
    op.set_timeout(BOUND_SECS)
    arena.rendezvous.barrier("before the faults")
    if fault is not None and run.device == "cpu":
        calls.at = calls.count + 1 + int(fault.share * num_calls)
    elif fault is not None:
        threading.Timer(fault.share * step_secs, strike_here).start()
    return named_by(lambda: (settle(op) for number in step_numbers(run.device) for _ in calls_of(case, op, number)))


def step_numbers(device: str) -> Iterator[int]:
    """Numbers of the steps to try. On a GPU a fault comes at a time, so they go on until an error comes."""
    deadline, number = time.monotonic() + GPU_STEPS_SECS, 2
    while number < 2 + MAX_STEPS or (device == "cuda" and time.monotonic() < deadline):
        yield number
        number += 1


def calls_of(case: Case, op: Any, number: int) -> Iterator[None]:
    """Makes the two calls of a step; results are compared with the oracle once the caller has settled them."""
    step = Step.dispatch(case, op, number, op.device)
    yield
    step.check_dispatched()
    rows, weights, expected, sums = step.before_combine()
    combined = op.combine(rows, weights, step.ids)
    yield
    step.check_combined(combined, expected, sums)


def problems_of(run: Run) -> list[str]:
    """Runs it; what was wrong, nothing as a rule."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with RankPool(run.world_size, device=run.device, timeout_secs=150, grace_secs=100, mps=False) as pool:
                pool.run(body, run, folder)
            stories: dict[int, str] = {}
        except RankFailure as failure:
            stories = {r: text for r, text in failure.tracebacks.items() if "exit code -9" not in text}
        signs = {r: Path(folder, f"struck {r}") for r in run.faults}
        struck = {r: path.stat().st_mtime for r, path in signs.items() if path.exists()}
        seen = {
            r: json.loads(path.read_text())
            for r in range(run.world_size)
            if (path := Path(folder, f"{r}.json")).exists()
        }
    found = [f"rank {r}: {text.strip().splitlines()[-1]}" for r, text in stories.items()]
    return found + (wrong_names(run, struck, seen) if struck else [])


def wrong_names(run: Run, struck: Mapping[int, float], seen: Mapping[int, dict[str, Any]]) -> list[str]:
    """What was wrong with whom the survivors named.

    Args:
        run: what was tried.
        struck: when the fault came, by rank. seen: what a rank has written down, by rank.
    """
    found = []
    survivors = sorted(set(range(run.world_size)) - set(struck))
    died = {rank for rank in struck if run.faults[rank].kind == "kill"}
    stopped = set(struck) - died
    # whoever waits for a rank that waits itself waits twice
    most_secs = 2 * BOUND_SECS + PATIENCE_SECS + SLACK_SECS
    if run.is_on_one_host and not stopped:
        most_secs = ON_HOST_SECS + SLACK_SECS
    elif run.phase != "step":
        most_secs = SILENT_SECS + SLACK_SECS
    first_error = min((each["at"] for each in seen.values() if each["named"]), default=0.0)
    unsure_secs = TO_ERROR_SECS if run.is_on_one_host else TO_OTHER_HOSTS_SECS
    sure = {rank for rank in died if struck[rank] < first_error - unsure_secs}
    named = {rank: seen[rank]["named"] for rank in survivors if rank in seen}
    # hosts agree on who is gone, and need not on who is late
    compared = [each if run.is_on_one_host else each and each[0] for each in named.values()]
    if any(each != compared[0] for each in compared):
        found.append(f"survivors disagree: {named}")
    for rank in survivors:
        if not named.get(rank):
            found.append(f"rank {rank} saw nothing")
        elif not is_right(run, set(named[rank][0]), set(named[rank][1]), sure, died):
            text = seen[rank]["text"][:300]
            found.append(f"rank {rank} named {named[rank]} and not {sorted(sure)} of {sorted(died)}: {text}")
        elif seen[rank]["secs"] > most_secs:
            found.append(f"rank {rank} waited {seen[rank]['secs']:.1f} s")
    return found


def is_right(run: Run, missing: set[int], late: set[int], sure: set[int], died: set[int]) -> bool:
    """Whether those who have died are missing; else some that are stopped are late, those that were waited for."""
    stopped = {rank for rank, fault in run.faults.items() if fault.kind == "stop"}
    if missing or sure:
        return sure <= missing <= (died if run.is_on_one_host else died | stopped) and not late
    return bool(late) and late <= stopped


def tried(seed: int, device: str, number: int) -> list[str]:
    """What was wrong in a run, for another process to call."""
    return problems_of(draw(seed, number, device))


def table(outcomes_by_number: Mapping[int, list[str]], seed: int, device: str) -> str:
    """Rows of a table by path."""
    counts: dict[str, Counter[str]] = {path: Counter() for path in (PATHS if device == "cpu" else GPU_PATHS)}
    for number, problems in outcomes_by_number.items():
        run = draw(seed, number, device)
        ranks = {"runs": 1, "faults": len(run.faults), "survivors": run.world_size - len(run.faults)}
        counts[run.path].update(ranks | {"wrong": len(problems)})
    rows = ["| path | runs | faults | survivors | wrong |", "|---|---|---|---|---|"]
    for path, count in counts.items():
        rows.append(f"| {path} | {' | '.join(str(count[name]) for name in ('runs', 'faults', 'survivors', 'wrong'))} |")
    return "\n".join(rows)


def main() -> None:
    """Runs them, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; each has 3 or 4 processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--log", type=Path, help="where runs are noted; those that stand there are not repeated")
    options = parser.parse_args()
    seed, device = options.seed, options.device
    log = options.log or Path(os.devnull)
    noted = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = {each["number"]: each["wrong"] for each in noted if (each["seed"], each["device"]) == (seed, device)}
    numbers = [number for number in range(options.runs) if number not in found]
    with (
        ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
        log.open("a") as file,
    ):
        outcomes = pool.map(functools.partial(tried, seed, device), numbers)
        for number, problems in zip(numbers, outcomes, strict=True):
            found[number] = problems
            file.write(json.dumps({"seed": seed, "device": device, "number": number, "wrong": problems}) + "\n")
            file.flush()
            for problem in problems:
                sys.stdout.write(f"{number} {draw(seed, number, device)}: {problem}\n")
            sys.stdout.flush()
    sys.stdout.write(table({number: found[number] for number in range(options.runs)}, seed, device) + "\n")


if __name__ == "__main__":
    main()
