"""Ranks that die or stop at random times, one after another; the others go on, and check every token.

`python -m tests.programs.losses --losses 300` on CPU ranks, with `--device cuda` on GPUs that ranks share by time
slices. It prints a line per loss, and a table of seconds to the first right step; it exits with 1 after a wrong one.
"""

import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch.distributed as dist
import typer

from ep_a2a.compat.combine_time_weights import CombineTimeWeightsOp
from ep_a2a.errors import RankTimeoutError
from ep_a2a.memory.arena import Arena
from ep_a2a.testing import RankFailure, RankPool
from tests.cases.mask_cases import op_of, take_step
from tests.waiting import await_until

OPS: dict[str, dict[str, Any]] = {
    "low_latency": {},
    "bulk": {"flagged_max_tokens": 0},
    "counters": {"flagged_max_tokens": 0, "max_sms": 8},
    "expert_major": {"layout": "expert_major"},
    "late_weights": {"layout": "expert_major", "kind": CombineTimeWeightsOp},
}
LIVING = (6, 2)
"""Ranks at the beginning of a pool's run, and at its end."""
STEPS, STEPS_AFTER = 6, 2
"""In which a rank is lost, and behind that when all know it."""
MASK_AFTER_SECS, SHORT_STOP_SECS = 5.0, 0.5
STOPS = 0.15
"""Share of losses in which a rank stops: half of them for a short time, which masks nobody."""


@dataclass(frozen=True)
class Loss:
    """What happens to a rank: in which step, how many seconds after its begin; for how long it stops, 0 = it dies."""

    victim: int
    step: int
    after_secs: float
    stop_secs: float


def draw(seed: int, num_ranks: tuple[int, int], step_secs: float) -> list[Loss]:
    """The losses of a pool."""
    drawn, living, losses = random.Random(seed), list(range(num_ranks[0])), []
    while len(living) > num_ranks[1]:
        victim = drawn.choice(living)
        stop = drawn.choice((SHORT_STOP_SECS, MASK_AFTER_SECS + 4)) if drawn.random() < STOPS else 0.0
        losses.append(
            Loss(victim, drawn.randrange(min(1, len(losses)), STEPS - 1), drawn.uniform(0, 2 * step_secs), stop)
        )
        if stop != SHORT_STOP_SECS:
            living.remove(victim)
    return losses


def be_lost(loss: Loss, told: Path) -> None:
    """Ends or stops this process; what wakes it is another one."""
    if loss.stop_secs:
        subprocess.Popen(["sh", "-c", f"sleep {loss.stop_secs}; kill -CONT {os.getpid()}"], start_new_session=True)
    told.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGSTOP if loss.stop_secs else signal.SIGKILL)


def live(context: Any, name: str, losses: list[Loss], folder: str) -> None:
    """Takes steps through all losses; writes a line about each."""
    number, living = 0, {*range(context.world_size)}
    with Arena(context.group, context.device) as arena:
        op = op_of(context, arena, mask_after_secs=MASK_AFTER_SECS, **OPS[name])
        dist.barrier(context.group)
        for place, loss in enumerate(losses):
            told, is_victim = Path(folder, f"{place}"), loss.victim == context.rank
            left = living - ({loss.victim} if loss.stop_secs != SHORT_STOP_SECS else set())
            ends: list[tuple[bool, float]] = []
            try:
                for step in range(STEPS):
                    if is_victim and step == loss.step:
                        threading.Timer(loss.after_secs, be_lost, (loss, told)).start()
                    ends.append((take_step(op, number), time.monotonic()))
                    number += 1
                if is_victim and loss.victim not in left:
                    # lost behind its last step: nobody waits for it any more
                    await_until(lambda: op.check() or False, "to be masked")
            except RankTimeoutError as error:
                if not is_victim or error.late_ranks != (context.rank,):
                    raise
                return
            await_until(told.exists, f"loss {place}")
            if not loss.stop_secs:
                await_until(lambda left=left: {*op.active_ranks()} == left, "masks")
            for _ in range(STEPS_AFTER):
                ends.append((take_step(op, number), time.monotonic()))
                number += 1
            assert not ends[-1][0]
            assert {*op.active_ranks()} == left, (op.active_ranks(), left)
            living = left
            lost_at = float(told.read_text())
            # the first step without a fault that ended behind the last one with a fault
            last_fault = max((at for is_faulty, at in ends if is_faulty), default=lost_at)
            right = min(at for _, at in ends if at > max(lost_at, last_fault))
            line = {"op": name, "rank": context.rank, **asdict(loss), "secs": round(right - lost_at, 3)}
            with Path(folder, f"{context.rank}.jsonl").open("a") as out:
                out.write(json.dumps(line) + "\n")


def main(
    losses: Annotated[int, typer.Option(help="how many, at least")] = 300,
    seed: Annotated[int, typer.Option(help="the first pool's")] = 0,
    device: str = "cpu",
    ranks: Annotated[int, typer.Option(help="of a pool at its beginning")] = LIVING[0],
    step_secs: Annotated[float, typer.Option(help="about what a step takes")] = 0.3,
    budget_secs: Annotated[float, typer.Option(help="begin no pool behind this time")] = 1e9,
) -> None:
    """Lose ranks."""
    num_done, wrong, secs, begin = 0, 0, dict[str, list[float]](), time.monotonic()
    while num_done < losses and time.monotonic() - begin < budget_secs:
        name, drawn = list(OPS)[seed % len(OPS)], draw(seed, (ranks, LIVING[1]), step_secs)
        with tempfile.TemporaryDirectory() as folder:
            expected = {loss.victim for loss in drawn if not loss.stop_secs}
            try:
                with RankPool(ranks, device=device, timeout_secs=600, grace_secs=500, mps=False) as pool:
                    pool.run(live, name, drawn, folder)
                found: set[int] = set()
            except RankFailure as failure:
                found = {*failure.tracebacks, *failure.unfinished}
                if found != expected:
                    typer.echo(failure)
            wrong += found != expected
            lines = [
                json.loads(text) for path in Path(folder).glob("*.jsonl") for text in path.read_text().splitlines()
            ]
        for place, loss in enumerate(drawn):
            of_loss = [each["secs"] for each in lines if all(each[key] == value for key, value in asdict(loss).items())]
            kind = "death" if not loss.stop_secs else "short stop" if loss.stop_secs == SHORT_STOP_SECS else "stop"
            if of_loss:
                secs.setdefault(kind, []).append(max(of_loss))
            typer.echo(f"seed {seed} {name} {place} of {ranks - place}: {loss} {kind} {max(of_loss, default=-1)}")
        num_done, seed = num_done + len(drawn), seed + 1
    for kind, found_secs in secs.items():
        ordered = sorted(found_secs)
        typer.echo(f"{kind}: {len(ordered)}, median {median(ordered):.2f} s, most {ordered[-1]:.2f} s to a right step")
    typer.echo(f"{num_done} losses, {wrong} pools with failures")
    raise typer.Exit(int(wrong > 0))


if __name__ == "__main__":
    typer.run(main)
