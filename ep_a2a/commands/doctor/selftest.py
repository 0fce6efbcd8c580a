"""Runs the self-test: every two ranks push bytes and flags to each other and run the op; then all ranks together."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import ep_a2a
from ep_a2a.commands import plots
from ep_a2a.commands.doctor.finding import Finding, error, note, ok, warning
from ep_a2a.commands.doctor.selftest_rank import PairResult, check_op, check_pair
from ep_a2a.errors import RankTimeoutError
from ep_a2a.testing.launch import RankFailure, RankPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ep_a2a.commands.progress import Progress

    Pair = tuple[int, int]

ALL_SECS = 1.0
LIMIT_SECS = 240.0
"""For one pair, compilation included. EP_A2A_TIMEOUT_SECS bounds the wait for a flag or row that never comes."""
SLOW = 0.5
"""A link with less than this share of the median rate gets a warning."""
CPU_NOTE = "on CPU, over shared memory, in Triton's interpreter: a functional check that says nothing about GPUs"
FLAGS_REMEDY = "Flags do not travel between these two: look at `nvidia-smi topo -m` and at native atomics."
OTHER_REMEDY = "Run it again with EP_A2A_LOG_LEVEL=INFO, and read the ranks' messages above."


@dataclass(frozen=True)
class SelfTest:
    """Results of a self-test.

    Attributes:
        device: "cpu" or "cuda". num_ranks: ranks that took part.
        pairs: what two ranks measured, or why they failed.
        together: a step of all ranks.
        note: what the numbers do not say where ranks share GPUs; "" else.
    """

    device: str
    num_ranks: int
    pairs: dict[Pair, PairResult] = field(default_factory=dict)
    together: PairResult = field(default_factory=PairResult)
    note: str = ""

    @property
    def gb_per_s(self) -> list[list[float]]:
        """`[a][b]`: 1e9 bytes per second from rank a to rank b; 0 where that is not known."""
        matrix = [[0.0] * self.num_ranks for _ in range(self.num_ranks)]
        for (a, b), result in self.pairs.items():
            matrix[a][b], matrix[b][a] = result.gb_per_s
        return matrix

    @property
    def table(self) -> str:
        """The matrix of rates as text; on CPU, whose rates say nothing, which pairs are right."""
        on_cpu, ranks = self.device == "cpu", range(self.num_ranks)
        heading = "Pushes from rank (down) to rank (across)" if on_cpu else "GB/s from rank (down) to rank (across)"
        lines = [heading, "      " + "".join(f"{rank:>9}" for rank in ranks)]
        for source, row in enumerate(self.gb_per_s):
            cells = ["failed" if not rate else "right" if on_cpu else f"{rate:.3g}" for rate in row]
            cells[source] = "-"
            lines.append(f"{source:>6}" + "".join(f"{cell:>9}" for cell in cells))
        return "\n".join(lines) + "\n"

    def as_json_object(self) -> dict[str, Any]:
        """Returns everything that was found; None in place of rates on CPU, which say nothing."""
        on_cpu = self.device == "cpu"
        results = [{"ranks": list(pair), **asdict(result)} for pair, result in self.pairs.items()]
        together = asdict(self.together)
        for each in (*results, together):
            del each["gb_per_s"]
        return {
            "device": self.device,
            "note": CPU_NOTE if on_cpu else self.note,
            "num_ranks": self.num_ranks,
            "gb_per_s": None if on_cpu else self.gb_per_s,
            "pairs": results,
            "together": together,
        }


def run_selftest(
    device: str,
    num_ranks: int,
    pair_secs: float,
    progress: Progress,
    body: Callable[..., PairResult | None] = check_pair,
) -> SelfTest:
    """Tests all pairs of ranks one after another, then all ranks together.

    A pair that fails ends the processes; the next one gets new ones, so that failures do not spread.

    Args:
        device: "cpu" or "cuda".
        num_ranks: processes.
        pair_secs: how long to measure a pair.
        progress: of a part for each pair, and one for all ranks together.
        body: what a rank does for a pair.
    """
    pairs: dict[Pair, PairResult] = {}
    with RankPool(num_ranks, device=device, timeout_secs=LIMIT_SECS + pair_secs) as pool:

        def try_part(name: str, rank: int, function: Callable[..., PairResult | None], *args: Any) -> PairResult:
            progress.begin(name)
            try:
                result: PairResult = pool.run(function, *args)[rank]
            except RankFailure as failure:
                result = _failed(failure)
            progress.end(name)
            return result

        for pair in itertools.combinations(range(num_ranks), 2):
            pairs[pair] = try_part(f"ranks {pair[0]} and {pair[1]}", pair[0], body, pair, pair_secs)
        together = try_part("all ranks together", 0, check_op, ALL_SECS)
    return SelfTest(device, num_ranks, pairs, together, pool.note)


def judge(test: SelfTest) -> list[Finding]:
    """Returns the findings of what the self-test measured."""
    results = {f"ranks {a}, {b}": result for (a, b), result in test.pairs.items()} | {"all ranks": test.together}
    findings = [error(result.error, result.remedy, who) for who, result in results.items() if result.error]
    if test.device != "cpu" and not test.note:
        findings += _slow_links(test.gb_per_s)
    if test.num_ranks < 2:
        findings.append(note("one rank has no peers: nothing was pushed", "--ranks 2 tries two.", "self-test"))
    if not findings:
        pushes = sum(each.num_pushes for each in test.pairs.values())
        steps = sum(each.num_steps for each in test.pairs.values())
        done = f"{len(test.pairs)} pairs: {pushes} pushes with flags and {steps} steps of the op, all right"
        findings.append(ok(done, subject="self-test"))
    if test.device == "cpu" or test.note:
        findings.append(note(CPU_NOTE if test.device == "cpu" else test.note, subject="self-test"))
    return findings


def _slow_links(gb_per_s: list[list[float]]) -> list[Finding]:
    rates = {(a, b): rate for a, row in enumerate(gb_per_s) for b, rate in enumerate(row) if rate}
    usual = statistics.median(rates.values()) if rates else 0.0
    remedy = "Look at `nvidia-smi nvlink -s` and `nvidia-smi topo -m`."
    return [
        warning(f"{rate:.0f} GB/s from {a} to {b}, the median is {usual:.0f}", remedy, f"ranks {a}, {b}")
        for (a, b), rate in rates.items()
        if rate < SLOW * usual
    ]


def _failed(failure: RankFailure) -> PairResult:
    """Returns the result of a part in which a rank failed."""
    known = failure.expected_error
    if known is None:
        return PairResult(error=failure.summary, remedy=OTHER_REMEDY)
    remedy = FLAGS_REMEDY if isinstance(known, RankTimeoutError) else known.remedy
    return PairResult(error=f"{type(known).__name__}: expected {known.expected}; got {known.got}", remedy=remedy)


def plot_rates(test: SelfTest, path: Path) -> tuple[Path, Path]:
    """Writes a heat map of the rates between ranks, on CPU which pairs passed; raises as `plots.write`.

    Args:
        test: what was measured. path: *.png or *.svg.
    """
    rates = [[rate or None for rate in row] for row in test.gb_per_s]
    known = [rate for row in rates for rate in row if rate is not None]
    failed = [f"{a} and {b}" for (a, b), result in test.pairs.items() if result.error]
    footer = f"EP {test.num_ranks} on {test.device} · ep_a2a {ep_a2a.__version__}, ep-a2a doctor --selftest"
    footer += f"\n{test.note}" if test.note else ""
    if test.device == "cpu":
        words = f"{len(test.pairs) - len(failed)} of {len(test.pairs)} pairs exchange bytes and flags"
        passed = [[None if a == b else float(bool(rate)) for b, rate in enumerate(row)] for a, row in enumerate(rates)]
        caption = plots.Caption(f"Functional check: {words}", "Over shared memory: says nothing about speed", footer)
        return plots.write(path, plots.cells, passed, caption, "1: right, 0: failed")
    span = f": {min(known):.3g} to {max(known):.3g} GB/s" if known else ": nothing was measured"
    reading = "From rank (down) to rank (across), pair by pair; grey: not measured"
    reading += f" (failed: {', '.join(failed)})" if failed else ""
    caption = plots.Caption(f"Rates of pushes between ranks{span}", reading, footer)
    return plots.write(path, plots.cells, rates, caption, "GB/s")
