"""Runs the self-test: every two ranks push bytes and flags to each other and run the op; then all ranks together."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.doctor.diagnostic import ERROR, NOTE, OK, WARNING, Diagnostic
from ep_a2a.commands.doctor.selftest_rank import PairResult, check_op, check_pair
from ep_a2a.errors import ConfigMismatchError, without_section
from ep_a2a.testing.launch import RankFailure, RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ep_a2a.commands.progress import Progress

    Pair = tuple[int, int]

PAIR_SECS = 2.0
ALL_SECS = 1.0
LIMIT_SECS = 240.0
"""For one pair, compilation included. EP_A2A_TIMEOUT_SECS bounds the wait for a flag or row that never comes."""
SLOW = 0.5
"""A link with less than this share of the median rate gets a warning."""
CPU_NOTE = "on CPU, over shared memory, in Triton's interpreter: a functional check that says nothing about GPUs"
REMEDIES = {
    "RankTimeoutError": "Flags do not travel between these two: look at `nvidia-smi topo -m` and at native atomics.",
    "PeerAccessError": "They do not reach each other's memory: use the allgather_reducescatter backend.",
    "HostMemoryError": "Enlarge /dev/shm (--shm-size, --ipc=host).",
    "DeviceMemoryError": "End the processes that hold the GPUs' memory (nvidia-smi).",
    "CheckFailedError": "Bytes change on the way: nvidia-smi -q -d ECC; dmesg | grep -i xid; replace the part.",
}
OTHER_REMEDY = "Run it again with EP_A2A_LOG_LEVEL=INFO, and read the ranks' messages above."


@dataclass(frozen=True)
class SelfTest:
    """Results of a self-test.

    Attributes:
        device: "cpu" or "cuda". num_ranks: ranks that took part.
        pairs: what two ranks measured, or why they failed, as text.
        together: why a step of all ranks failed; "" where it did not. step_us: how long it took.
        note: what the numbers do not say where ranks share GPUs; "" else.
    """

    device: str
    num_ranks: int
    pairs: dict[Pair, PairResult | str] = field(default_factory=dict)
    together: str = ""
    step_us: float = 0.0
    note: str = ""

    @property
    def measured(self) -> list[PairResult]:
        """Results of the pairs that did not fail."""
        return [result for result in self.pairs.values() if isinstance(result, PairResult)]

    @property
    def failures(self) -> dict[str, str]:
        """Why ranks failed, by their names in the report."""
        named = {f"ranks {a}, {b}": result for (a, b), result in self.pairs.items() if isinstance(result, str)}
        return named | ({"all ranks": self.together} if self.together else {})

    @property
    def gb_per_s(self) -> list[list[float]]:
        """`[a][b]`: 1e9 bytes per second from rank a to rank b; 0 where that is not known."""
        matrix = [[0.0] * self.num_ranks for _ in range(self.num_ranks)]
        for (a, b), result in self.pairs.items():
            if isinstance(result, PairResult):
                matrix[a][b], matrix[b][a] = result.gb_per_s
        return matrix

    @property
    def table(self) -> str:
        """The matrix of rates as text; on CPU, whose rates say nothing, which pairs are right."""
        on_cpu = self.device == "cpu"
        lines = [
            "Pushes from rank (down) to rank (across)" if on_cpu else "GB/s from rank (down) to rank (across)",
            "      " + "".join(f"{rank:>9}" for rank in range(self.num_ranks)),
        ]
        for source, row in enumerate(self.gb_per_s):
            rates = ["failed" if not rate else "right" if on_cpu else f"{rate:.3g}" for rate in row]
            cells = ["-" if source == place else rate for place, rate in enumerate(rates)]
            lines.append(f"{source:>6}" + "".join(f"{cell:>9}" for cell in cells))
        return "\n".join(lines) + "\n"

    def as_json_object(self) -> dict[str, Any]:
        """Returns everything that was found; None in place of rates and times on CPU, which say nothing."""
        on_cpu = self.device == "cpu"
        pairs = [
            {"ranks": list(pair)}
            | ({"error": result} if isinstance(result, str) else result.as_json_object(with_times=not on_cpu))
            for pair, result in self.pairs.items()
        ]
        return {
            "device": self.device,
            "note": CPU_NOTE if on_cpu else self.note,
            "num_ranks": self.num_ranks,
            "gb_per_s": None if on_cpu else self.gb_per_s,
            "pairs": pairs,
            "together": {"error": self.together, "step_us": None if on_cpu else self.step_us},
        }


def run_selftest(
    device: str,
    num_ranks: int,
    pair_secs: float = PAIR_SECS,
    progress: Progress | None = None,
    body: Callable[..., PairResult | None] = check_pair,
) -> SelfTest:
    """Tests all pairs of ranks one after another, then all ranks together.

    A pair that fails ends the processes; the next one gets new ones, so that failures do not spread.

    Args:
        device: "cpu" or "cuda".
        num_ranks: processes.
        pair_secs: how long to measure a pair.
        progress: of num_parts(num_ranks) parts; None shows nothing.
        body: what a rank does for a pair.
    """
    pairs: dict[Pair, PairResult | str] = {}
    with RankPool(num_ranks, device=device, timeout_secs=LIMIT_SECS + pair_secs) as pool:
        for pair in itertools.combinations(range(num_ranks), 2):
            with _part(progress, f"ranks {pair[0]} and {pair[1]}"):
                try:
                    pairs[pair] = pool.run(body, pair, pair_secs)[pair[0]]
                except RankFailure as failure:
                    pairs[pair] = _error_text(failure)
        step_us, together = 0.0, ""
        with _part(progress, "all ranks together"):
            try:
                step_us = pool.run(check_op, ALL_SECS)[0][0]
            except RankFailure as failure:
                together = _error_text(failure)
    return SelfTest(device, num_ranks, pairs, together, step_us, pool.note)


def num_parts(num_ranks: int) -> int:
    """Returns the parts of a self-test: the pairs, and all ranks together."""
    return math.comb(num_ranks, 2) + 1


@contextlib.contextmanager
def _part(progress: Progress | None, name: str) -> Iterator[None]:
    if progress is not None:
        progress.begin(name)
    yield
    if progress is not None:
        progress.end(name)


def judge(test: SelfTest) -> list[Diagnostic]:
    """Returns the diagnostics of what the self-test measured."""
    diagnostics = [
        Diagnostic(who, ERROR, words, REMEDIES.get(words.partition(":")[0], OTHER_REMEDY))
        for who, words in test.failures.items()
    ]
    diagnostics += _slow_links(test)
    if test.num_ranks < 2:
        diagnostics.append(
            Diagnostic("self-test", NOTE, "one rank has no peers: nothing was pushed", "--ranks 2 tries two.")
        )
    if not diagnostics:
        pushes, steps = (sum(getattr(each, name) for each in test.measured) for name in ("num_pushes", "num_steps"))
        done = f"{len(test.measured)} pairs: {pushes} pushes with flags and {steps} steps of the op, all right"
        diagnostics.append(Diagnostic("self-test", OK, done))
    if test.device == "cpu" or test.note:
        diagnostics.append(Diagnostic("self-test", NOTE, CPU_NOTE if test.device == "cpu" else test.note))
    return diagnostics


def _slow_links(test: SelfTest) -> list[Diagnostic]:
    rates = [rate for row in test.gb_per_s for rate in row if rate]
    if test.device == "cpu" or test.note or not rates:
        return []
    usual = statistics.median(rates)
    return [
        Diagnostic(
            f"ranks {a}, {b}",
            WARNING,
            f"{rate:.0f} GB/s from {a} to {b}, the median is {usual:.0f}",
            "Look at `nvidia-smi nvlink -s` and `nvidia-smi topo -m`.",
        )
        for a, row in enumerate(test.gb_per_s)
        for b, rate in enumerate(row)
        if 0 < rate < SLOW * usual
    ]


def _error_text(failure: RankFailure) -> str:
    """Returns the first failing rank's error in a line; ConfigMismatchErrors only repeat another rank's."""
    errors = [*failure.errors.values()]
    if errors:
        first = next((each for each in errors if not isinstance(each, ConfigMismatchError)), errors[0])
        return f"{type(first).__name__}: {without_section(str(first))}"
    return failure.summary
