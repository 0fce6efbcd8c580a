"""Replayed round trips that draw their routing anew and check themselves on the device.

`python -m tests.programs.soak --steps 1000000` on GPUs, with `--device cpu --ranks 2` in interpreted processes on small
shapes; tests/multiprocess/test_soak.py and tests/multigpu/test_soak.py run a few steps.
"""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from ep_a2a.memory.arena import Arena
from ep_a2a.testing import RankContext, RankPool
from tests.cases.op_cases import Case, make_op
from tests.multigpu.used_variants import compiled_when_used
from tests.replay import CapturedStep

LARGEST = 7
"""Tokens hold whole numbers up to this, so that a sum over all ranks is exact in bfloat16."""
REPLAYS_BETWEEN_LOOKS = 10_000
GAINED = ("bytes", "descriptors")
FLAGGED = Case(hidden_dim=1024, topk=8, num_experts=64, max_tokens=32, layout="rank_major", with_weights=False)
SOAKED = {
    "flagged": FLAGGED,
    "flags": replace(FLAGGED, max_tokens=300, layout="compact"),
    "bulk": replace(FLAGGED, options={"flagged_max_tokens": 0}),
}

SMALL = replace(FLAGGED, hidden_dim=8, topk=2, num_experts=4, max_tokens=3)
SOAKED_ON_CPU = {"flagged": SMALL, "flags": replace(SMALL, layout="compact", options={"flagged_max_tokens": 0})}


@dataclass(frozen=True)
class Soaked:
    """What a rank has to tell.

    Attributes:
        num_round_trips: made. num_wrong: elements that were wrong in any of them.
        gained_bytes: memory that came into use between the first look and the last: the device's; on CPU what the
            process has in RAM.
        gained_descriptors: file descriptors that came into use meanwhile.
    """

    num_round_trips: int
    num_wrong: int
    gained_bytes: int
    gained_descriptors: int = 0


class SelfCheckingStep:
    """A round trip with identity experts on tokens and ids that are drawn on the device, and its check.

    The routing leaves ids out at random, now and then all of a token or of a rank.
    """

    def __init__(self, context: RankContext, case: Case, arena: Arena) -> None:
        self.op = make_op(context, case, arena)
        self._case, device = case, context.device
        self._tokens = torch.zeros(case.max_tokens, case.hidden_dim, dtype=case.dtype, device=device)
        self._ids = torch.zeros(case.max_tokens, case.topk, dtype=torch.int32, device=device)
        self._copies = torch.zeros(case.max_tokens, 1, device=device)
        self.num_wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._result: torch.Tensor | None = None

    def draw(self) -> None:
        """New tokens and ids, and how many ranks each token goes to."""
        case, device = self._case, self._ids.device
        self._tokens.copy_(torch.randint(-LARGEST, LARGEST + 1, self._tokens.shape, device=device))
        ids = torch.rand(case.max_tokens, case.num_experts, device=device).argsort(1)[:, : case.topk]
        # one threshold for the rank and one per token
        keeps = torch.rand(ids.shape, device=device) < torch.rand(case.max_tokens, 1, device=device).sqrt()
        keeps &= torch.rand(1, 1, device=device) < 0.9
        self._ids.copy_(torch.where(keeps, ids, -1))
        per_rank = case.num_experts // case.world_size
        owners = torch.where(keeps, ids // per_rank, case.world_size)
        goes = torch.zeros(case.max_tokens, case.world_size + 1, device=device).scatter_(1, owners, 1.0)
        self._copies.copy_(goes[:, : case.world_size].sum(1, keepdim=True))

    def move(self) -> None:
        """Dispatch and combine."""
        got = self.op.dispatch(self._tokens, None, None, self._ids)
        self._result, _ = self.op.combine(got[0], None, None)

    def compare(self) -> None:
        """Counts the elements that are not exactly the token's times the ranks that it went to."""
        expected = (self._tokens.float() * self._copies).to(self._tokens.dtype)
        self.num_wrong += (self._result[: self._case.max_tokens] != expected).sum()


def soak(context: RankContext, case: Case, num_steps: int, steps_between_looks: int = REPLAYS_BETWEEN_LOOKS) -> Soaked:
    """Replays a captured round trip that checks itself; looks at the memory in use now and then."""
    # what an earlier test has left must not go while descriptors are counted
    gc.collect()
    torch.manual_seed(case.seed * case.world_size + context.rank)
    with Arena(context.group, context.device) as arena:
        step = SelfCheckingStep(context, case, arena)

        def body(call: Callable[[Callable[[], None]], None]) -> None:
            call(step.draw)
            step.move()
            call(step.compare)

        # what a capture needs is made by the same calls before it
        body(lambda work: work())
        captured = CapturedStep(step.op, body)
        made = 1 + int(captured.ran_at_capture)
        looks = []
        while made < num_steps:
            for _ in range(min(steps_between_looks, num_steps - made)):
                captured.replay()
                made += 1
            step.op.check()
            looks.append((used_bytes(context.device), len(os.listdir("/proc/self/fd"))))
        gained = (last - first for first, last in zip(looks[0], looks[-1]))
        return Soaked(made, int(step.num_wrong), *gained)


def used_bytes(device: torch.device) -> int:
    """Memory in use: on a GPU all of the GPU's, on CPU what this process has in RAM."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def command(
    steps: Annotated[int, typer.Option(min=3, help="Round trips of each case.")] = 1_000_000,
    ranks: Annotated[int, typer.Option(help="Processes; 0 = one for each GPU.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    seed: Annotated[int, typer.Option(help="Of tokens and routing.")] = 1,
    cases: Annotated[str, typer.Option(help="Comma-separated: flagged, flags, bulk.")] = "flagged,flags",
) -> None:
    """Soaks each case and prints a line for it: round trips, wrong elements, memory and descriptors gained, seconds."""
    world_size = ranks or torch.cuda.device_count()
    known = SOAKED if device == "cuda" else SOAKED_ON_CPU
    with RankPool(world_size, device=device, timeout_secs=24 * 3600) as pool:
        for name in cases.split(","):
            start = time.monotonic()
            case = replace(known[name], world_size=world_size, seed=seed)
            found = pool.run(compiled_when_used, soak, case, steps)
            gained = " | ".join(str(max(getattr(each, f"gained_{what}") for each in found)) for what in GAINED)
            secs = time.monotonic() - start
            num_wrong = sum(each.num_wrong for each in found)
            typer.echo(f"| {name} | {found[0].num_round_trips} | {num_wrong} | {gained} | {secs:.0f} |")


if __name__ == "__main__":
    typer.run(command)
