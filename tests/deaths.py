"""Random kills and stops: ranks die at any place of a step, and every survivor must name exactly those that are gone.

`python -m tests.deaths --runs 200 --seed 1` runs on CPU processes and prints a table. A rank dies, or stops for good,
at a random call of device code in a step that was measured before, or behind it. Those who survive write down whom
their error names. A rank whose fault was drawn for a place that it did not come to survives, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep_a2a.errors import RankTimeoutError
from ep_a2a.kernels.jit import PortableFunction
from ep_a2a.memory.arena import Arena
from ep_a2a.ops.agreement import PATIENCE_SECS
from ep_a2a.testing import RankFailure, RankPool
from tests.cases.fault_cases import await_file, settle
from tests.cases.op_cases import Case, Step, make_op, run_step
from tests.cases.staged_cases import node_arena, over_torch_distributed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.testing import RankContext

BOUND_SECS = 4.0
SLACK_SECS = 8.0
"""What a loaded machine may add."""
MAX_STEPS = 4
PATHS = (
    "IntraNode", "InterNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL", "InterNodeV1 by puts", "AsyncLL by puts",
    "InterNodeV1 over torch.distributed", "InterNodeV1LL over torch.distributed",
)  # fmt: skip
TRANSPORTS = {"by puts": "nvshmem", "over torch.distributed": "torch.distributed"}


@dataclass(frozen=True)
class Fault:
    """What happens to a rank: "kill" or "stop", at this share of the device calls of its step, 1 to 1.3 behind it."""

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

    @property
    def case(self) -> Case:
        """The op of the run."""
        kernel, _, transport = self.path.partition(" ")
        num_nodes = 1 if kernel == "IntraNode" else 3 if self.world_size == 3 else 2
        options: dict[str, Any] = {"flagged_max_tokens": self.flagged_max_tokens, "first_timeout_secs": 60.0}
        if transport:
            options["internode_transport"] = TRANSPORTS[transport]
        case = Case(
            world_size=self.world_size, hidden_dim=32, num_experts=2 * self.world_size, tokens=((4, 3, 5),),
            max_tokens=5, layout=self.layout, split=self.split, num_nodes=num_nodes, kernel=kernel, options=options,
        )  # fmt: skip
        return over_torch_distributed(case) if self.is_staged else case

    @property
    def is_staged(self) -> bool:
        """Whether the host moves rows between nodes."""
        return self.path.endswith("torch.distributed")


def draw(seed: int, number: int) -> Run:
    """The run of this number."""
    rng = random.Random(f"{seed} {number}")
    path, world_size = PATHS[number % len(PATHS)], rng.choice((3, 4))
    num_faults = rng.choice((1, 1, 2) if world_size == 3 else (1, 1, 2, 3))
    victims = sorted(rng.sample(range(world_size), num_faults))
    faults = {rank: Fault(rng.choice(("kill", "kill", "stop")), rng.random() * 1.3) for rank in victims}
    layouts = ("compact", "rank_major", "expert_major")
    return Run(path, world_size, rng.choice((0, 128)), rng.choice(layouts), rng.choice(("", "mixed")), faults)


class FaultyCalls:
    """Counts this process' calls of device functions; `fault` comes at the call of number `at`."""

    def __init__(self) -> None:
        self.count, self.at = 0, -1
        self.fault = ""
        original = PortableFunction.__call__

        def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self.strike()
            return original(function, *args, **kwargs)

        self._original = original
        PortableFunction.__call__ = counted  # type: ignore[method-assign]

    def strike(self) -> None:
        """Ends or stops this process, and leaves a sign of it."""
        path, _, kind = self.fault.partition("|")
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def undo(self) -> None:
        PortableFunction.__call__ = self._original  # type: ignore[method-assign]


def body(context: RankContext, run: Run, folder: str) -> None:
    """A rank of a run: steps until an error, or until its fault comes."""
    case, rank = run.case, context.rank
    arena = node_arena(context, case.num_nodes) if run.is_staged else Arena(context.group, context.device)
    op = make_op(context, case, arena)
    pids = arena.rendezvous.exchange("process numbers", os.getpid())
    calls = FaultyCalls()
    run_step(case, op, 0, context.device)
    before = calls.count
    run_step(case, op, 1, context.device)
    num_calls = calls.count - before
    op.set_timeout(BOUND_SECS)
    arena.rendezvous.barrier("before the faults")
    fault = run.faults.get(rank)
    if fault is not None:
        calls.fault, calls.at = f"{folder}/struck {rank}|{fault.kind}", calls.count + 1 + int(fault.share * num_calls)
    seen: dict[str, Any] = {"named": None}
    start = time.monotonic()
    try:
        for number in range(2, 2 + MAX_STEPS):
            for call in calls_of(case, op, number):
                start = time.monotonic()
                next(call, None)
                settle(op)
    except RankTimeoutError as error:
        seen = {"named": [error.missing_ranks, error.late_ranks], "text": str(error)}
    seen["secs"] = time.monotonic() - start
    calls.undo()
    Path(folder, f"{rank}.part").write_text(json.dumps(seen))
    Path(folder, f"{rank}.part").rename(Path(folder, f"{rank}.json"))
    for other in range(case.world_size):
        if other != rank and not Path(folder, f"struck {other}").exists():
            await_file(Path(folder, f"{other}.json"))
    for other in run.faults:
        if Path(folder, f"struck {other}").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[other], signal.SIGKILL)


def calls_of(case: Case, op: Any, number: int) -> Iterator[Iterator[None]]:
    """The two calls of a step, each to be begun by its caller; results are compared with the oracle."""
    made: list[Step] = []

    def dispatches() -> Iterator[None]:
        made.append(Step.dispatch(case, op, number, op.device))
        yield

    yield dispatches()
    made[0].check_dispatched()
    rows, weights, expected, sums = made[0].before_combine()

    def combines() -> Iterator[None]:
        made.append(op.combine(rows, weights, made[0].ids))
        yield

    yield combines()
    made[0].check_combined(made[1], expected, sums)  # type: ignore[arg-type]


def problems_of(run: Run) -> list[str]:
    """Runs it; what was wrong, nothing as a rule."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with RankPool(run.world_size, timeout_secs=150, grace_secs=100) as pool:
                pool.run(body, run, folder)
            died: tuple[int, ...] = ()
            stories: dict[int, str] = {}
        except RankFailure as failure:
            stories = {r: text for r, text in failure.tracebacks.items() if "exit code -9" not in text}
        died = tuple(r for r in run.faults if Path(folder, f"struck {r}").exists())
        seen = {r: json.loads(path.read_text()) for r in range(run.world_size)
                if (path := Path(folder, f"{r}.json")).exists()}  # fmt: skip
    found = [f"rank {r}: {text.strip().splitlines()[-1]}" for r, text in stories.items()]
    if not died:
        return found
    stops = any(run.faults[r].kind == "stop" for r in died)
    # whoever waits for a rank that waits itself waits twice, and a stop must last
    most_secs = (3 if stops else 2) * BOUND_SECS + PATIENCE_SECS + SLACK_SECS
    for rank in sorted(set(range(run.world_size)) - set(died)):
        if rank not in seen:
            found.append(f"rank {rank} saw nothing")
        elif seen[rank]["named"] != [list(died), []]:
            found.append(f"rank {rank} named {seen[rank]['named']} and not {died}: {seen[rank].get('text', '')[:300]}")
        elif seen[rank]["secs"] > most_secs:
            found.append(f"rank {rank} waited {seen[rank]['secs']:.1f} s")
    return found


def main() -> None:
    """Runs them, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {path: Counter() for path in PATHS}
    for number in range(options.first, options.first + options.runs):
        run = draw(options.seed, number)
        problems = problems_of(run)
        count = counts[run.path]
        count["runs"] += 1
        count["survivors"] += run.world_size - len(run.faults)
        count["faults"] += len(run.faults)
        count["wrong"] += len(problems)
        for problem in problems:
            sys.stdout.write(f"{number} {run}: {problem}\n")
        sys.stdout.flush()
    sys.stdout.write("| path | runs | faults | survivors | wrong |\n|---|---|---|---|---|\n")
    for path, count in counts.items():
        row = " | ".join(str(count[name]) for name in ("runs", "faults", "survivors", "wrong"))
        sys.stdout.write(f"| {path} | {row} |\n")


if __name__ == "__main__":
    main()
