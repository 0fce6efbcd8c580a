"""Searches for the launch numbers with the fastest round trips, writes them to tuned tables and prints them."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ep_a2a
from ep_a2a import env
from ep_a2a.commands import messages
from ep_a2a.commands.files import check_folder
from ep_a2a.commands.measure.session import OpRoundTrip, make_config
from ep_a2a.commands.measure.timing import Timer
from ep_a2a.commands.progress import Progress
from ep_a2a.commands.tables import new_table
from ep_a2a.config import QuantType
from ep_a2a.errors import CheckFailedError, ConfigError, UnsupportedError
from ep_a2a.memory.rendezvous import Rendezvous
from ep_a2a.testing.launch import RankFailure, RankPool
from ep_a2a.tuning import tables
from ep_a2a.tuning.parse import LAUNCH_FIELDS, MAX_PROGRAMS, PROGRAM_FIELDS
from ep_a2a.tuning.policy import Phase, choose_launch, dispatch_phase
from ep_a2a.tuning.tables import Evidence, TableEntry, TunedLaunch, TunedTables, shape_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ep_a2a.commands.measure.timing import TimingSettings
    from ep_a2a.commands.measure.workload import Workload
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.testing.worker import RankContext

Launches = dict[str, TunedLaunch]
"""By value of policy.Phase: the dispatch that a step takes, and combine."""

DEFAULT_SIZES = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
VALUES = {
    "num_warps": (2, 4, 8, 16),
    "send_elements": (1024, 2048, 4096, 8192),
    "add_elements": (512, 1024, 2048),
    "pause_ns": (0, 100, 500),
    "send_rows": (1, 2, 4),
}
"""Values to try, by launch number; numbers of programs are scaled instead."""
SCALES = (0.5, 0.75, 1.5, 2.0)
"""Factors to try for numbers of programs."""
LEAST_GAIN = 0.01
"""Share of the time that a better launch must save; less is noise."""
POINT_TIMEOUT_SECS = 900.0
"""Seconds beyond a point's budget, for building the op and compiling the last trial."""


def execute(
    points: Sequence[Workload],
    settings: TimingSettings,
    budget_secs: float,
    folder: Path,
    *,
    as_json: bool = False,
    note: str = "",
) -> bool:
    """Searches for each workload, writes tables into the folder and prints the outcomes.

    Args:
        points: all of one number of ranks. settings: how a trial is timed.
        budget_secs: seconds of each search.
        folder: of the tables; made where it does not exist.
        note: sharing_note of the ranks, for JSON.

    Returns:
        Whether every size could be measured.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    check_folder(folder)
    outcomes: list[Outcome] = []
    searchers = Searchers(points[0].world_size, budget_secs + POINT_TIMEOUT_SECS)
    with contextlib.closing(searchers), Progress("tuning", len(points), messages.notices()) as progress:
        for point in points:
            progress.begin(f"{_point_text(point)}, {budget_secs:g} s at most")
            result = tune_point(point, searchers, settings, budget_secs, folder)
            if isinstance(result, str):
                progress.end(result, "red")
            else:
                outcomes.append(result)
                times = f"{result.default_us:.1f} -> {result.best_us:.1f} µs"
                progress.end(f"{_point_text(result.workload)}: {times}")
    if as_json:
        results = [each.as_json_object() for each in outcomes]
        messages.print_json({"folder": str(folder), "note": note, "results": results})
    elif outcomes:
        show(outcomes)
    if outcomes:
        messages.note(f"tables: {folder}")
    return len(outcomes) == len(points)


def _point_text(point: Workload) -> str:
    bound = f" on {point.max_sms} multiprocessors" if point.max_sms else ""
    cast = f", {point.combine_quant} back" if point.combine_quant != QuantType.NONE else ""
    return f"{point.max_num_tokens} tokens{bound}{cast}"


def default_output(note: str = "") -> Path:
    """Returns the folder for tables: EP_A2A_TUNING_DIR, else configs/ of the checkout.

    Args:
        note: sharing_note of the ranks; "" where each has a GPU of its own.

    Raises:
        ConfigError: neither is there, or ranks share GPUs.
    """
    if note:
        raise ConfigError(
            "--output DIR where ranks share GPUs",
            note,
            "Say --output with a folder of its own: ranks with a GPU each take their launches from the usual tables.",
        )
    own = env.TUNING_DIR.get()
    if own and own != tables.NO_TABLES:
        return Path(own)
    shipped = tables.shipped_directory()
    # Installed files belong to the package manager.
    if shipped.parent == Path(ep_a2a.__file__).resolve().parent or not shipped.is_dir():
        raise ConfigError("a folder for the tables", "none", f"Say --output DIR, and set {env.TUNING_DIR.name} to it.")
    return shipped


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints analytic and best launches and their times."""
    numbers = ("analytic µs", "best µs", "saved", "trials")
    table = new_table("round trips, µs", ("max tokens", "phase", "analytic", "best", *numbers), right=numbers)
    for outcome in outcomes:
        saved = f"{1 - outcome.best_us / outcome.default_us:.1%}"
        trials = f"{outcome.num_trials}{'' if outcome.is_complete else ', out of time'}"
        times = (f"{outcome.default_us:.1f}", f"{outcome.best_us:.1f}", saved, trials)
        for number, phase in enumerate(outcome.default):
            first = number == 0
            cells = (_text(outcome.default[phase], phase), _text(outcome.best[phase], phase))
            size = _point_text(outcome.workload).replace(" tokens", "") if first else ""
            table.add_row(size, phase, *cells, *(times if first else ("",) * len(times)))
    messages.output().print(table)


def _text(launch: TunedLaunch, phase: str) -> str:
    """Its numbers; "each" for one program for each unit of work."""
    parts = []
    for name in LAUNCH_FIELDS[phase]:
        number = getattr(launch, name)
        parts.append(f"{name.removeprefix('num_')} {'each' if name in PROGRAM_FIELDS and number == 0 else number}")
    return " ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """Result of a search for one workload, the same on all ranks.

    Attributes:
        workload: the tokens that were moved; its max_num_tokens is the key's.
        default, best: analytic launch numbers and the fastest ones, by phase.
        default_us, best_us: microseconds of a round trip, measured one after the other when the search was over.
        num_trials: launches timed. is_complete: every neighbour of the best was tried within the budget.
        arch, device: of the GPUs.
    """

    workload: Workload
    default: Launches
    best: Launches
    default_us: float
    best_us: float
    num_trials: int
    is_complete: bool
    arch: str
    device: str

    def as_json_object(self) -> dict[str, Any]:
        """Returns what was found, for --json."""
        found = {name: value for name, value in asdict(self).items() if name != "workload"}
        point = {name: getattr(self.workload, name) for name in ("max_num_tokens", "max_sms", "combine_quant")}
        return point | found


def neighbours(phase: str, launch: TunedLaunch) -> Iterator[TunedLaunch]:
    """Yields the launches that differ from this one in one number."""
    for name in LAUNCH_FIELDS[phase]:
        now: int = getattr(launch, name)
        values = VALUES.get(name) or [min(MAX_PROGRAMS, max(1, round(now * scale))) for scale in SCALES]
        yield from (replace(launch, **{name: value}) for value in values if value != now)


@dataclass
class Search:
    """Coordinate search: tries the neighbours of the fastest launch so far.

    Args:
        time_of: microseconds of a round trip with these launches; infinite where the result is wrong.
        effect_of: what the launches come to on this device; of those with one effect only the first is timed.
        has_time: whether another trial may begin. The three answer the same on all ranks.
    """

    time_of: Callable[[Launches], float]
    effect_of: Callable[[Launches], Any]
    has_time: Callable[[], bool]
    num_trials: int = 0
    is_complete: bool = False

    def run(self, start: Launches) -> Launches:
        """Returns the fastest launches found from `start`."""
        tried = {self.effect_of(start)}
        best, best_us = start, self._time(start)
        while True:
            trial = next(self._untried(best, tried), None)
            if trial is None:
                self.is_complete = True
                return best
            if not self.has_time():
                return best
            tried.add(self.effect_of(trial))
            trial_us = self._time(trial)
            if trial_us < best_us * (1 - LEAST_GAIN):
                best, best_us = trial, trial_us

    def _time(self, launches: Launches) -> float:
        self.num_trials += 1
        return self.time_of(launches)

    def _untried(self, around: Launches, tried: set[Any]) -> Iterator[Launches]:
        for phase, launch in around.items():
            for other in neighbours(phase, launch):
                trial = around | {phase: other}
                if self.effect_of(trial) not in tried:
                    yield trial


def tables_of(config: EpDispatchCombineConfig, launches: Mapping[str, TunedLaunch]) -> TunedTables:
    """Returns tables with these launches for steps of M tokens."""
    nothing = Evidence(0.0, 0.0, 0, "", {}, "")
    size = config.max_num_inp_token_per_rank
    return TunedTables(
        {
            phase: (TableEntry(shape_key(config, phase, size, config.max_sms), launch, nothing, "of this trial"),)
            for phase, launch in launches.items()
        }
    )


def chosen_launches(config: EpDispatchCombineConfig, num_sms: int, tuned: TunedTables | None = None) -> Launches:
    """Returns the policy's launches for steps of M tokens: the analytic numbers, or those of tables.

    Numbers of tables are cut to the device and the work.
    """
    size = config.max_num_inp_token_per_rank
    launches = {}
    for phase in (dispatch_phase(config, size), Phase.COMBINE):
        launch = choose_launch(config, phase, size, size, num_sms, tables=tuned)
        launches[phase.value] = TunedLaunch(**{name: getattr(launch, name) for name in LAUNCH_FIELDS[phase.value]})
    return launches


def open_ended(config: EpDispatchCombineConfig, launches: Launches, num_sms: int) -> Launches:
    """Returns the launches with 0 for each number of programs that a program per unit of work would be, too.

    A table's 0 means that. A number of the tuned size would bound steps of more tokens, which take the same entry.
    """
    result = dict(launches)
    for phase in launches:
        for name in (name for name in LAUNCH_FIELDS[phase] if name in PROGRAM_FIELDS):
            open_one = result | {phase: replace(result[phase], **{name: 0})}
            if effect_of(config, open_one, num_sms) == effect_of(config, result, num_sms):
                result = open_one
    return result


def effect_of(config: EpDispatchCombineConfig, launches: Launches, num_sms: int) -> tuple[Any, ...]:
    """Returns the launches that the policy makes of these on a device; equal results need only one trial."""
    size, tuned = config.max_num_inp_token_per_rank, tables_of(config, launches)
    chosen = [choose_launch(config, Phase(phase), size, size, num_sms, tables=tuned) for phase in launches]
    return tuple(replace(launch, reason="") for launch in chosen)


def search_point(context: RankContext, workload: Workload, settings: TimingSettings, budget_secs: float) -> Outcome:
    """Searches for the best launches of one workload. Collective; the same on every rank.

    Raises:
        CheckFailedError: round trips are wrong with analytic launches already.
    """
    rendezvous, timer = Rendezvous(context.group), Timer(context, settings)
    properties = torch.cuda.get_device_properties(context.device)
    num_sms, name = properties.multi_processor_count, properties.name
    config = make_config(workload, context.rank)
    session = OpRoundTrip(workload, context)
    deadline = time.monotonic() + budget_secs

    def time_of(launches: Launches) -> float:
        session.op.engine.use_tables(tables_of(config, launches))
        if not _is_right(session, rendezvous):
            return math.inf
        return timer.median_us(session.round_trip)

    default = chosen_launches(config, num_sms)
    search = Search(
        time_of,
        lambda launches: effect_of(config, launches, num_sms),
        lambda: all(rendezvous.exchange("time left", time.monotonic() < deadline)),
    )
    best = search.run(default)
    # Measured once more, one after the other: the fastest of many trials was also the luckiest.
    default_us, best_us = time_of(default), time_of(best)
    if not math.isfinite(default_us):
        raise CheckFailedError("right results with analytic launches", "wrong ones", "Run ep-a2a bench; it says more.")
    if best_us >= default_us:
        best, best_us = default, default_us
    best = open_ended(config, chosen_launches(config, num_sms, tables_of(config, best)), num_sms)
    session.close()
    arch = tables.arch_name((properties.major, properties.minor))
    return Outcome(workload, default, best, default_us, best_us, search.num_trials, search.is_complete, arch, name)


def _is_right(session: OpRoundTrip, rendezvous: Rendezvous) -> bool:
    """Returns whether the session's check passes on all ranks. Collective."""
    problem = None
    try:
        session.check()
    except CheckFailedError as error:
        problem = str(error)
    return not any(rendezvous.exchange("check of a trial", problem))


def entries_of(outcome: Outcome, note: str = "") -> dict[str, TableEntry]:
    """Returns the table entries of an outcome, by phase; note: what else their readers must know."""
    workload, config = outcome.workload, make_config(outcome.workload, 0)
    num_bytes = workload.dispatch_bytes + workload.combine_bytes
    us = round(outcome.best_us, 2)
    tried = (
        f"layout {workload.layout}; analytic launches: {outcome.default_us:.1f} us; {outcome.num_trials} launches tried"
    )
    evidence = Evidence(
        us=us,
        gb_per_s=round(num_bytes / us / 1e3, 1),
        remote_rows=workload.busiest_remote_rows,
        device=outcome.device,
        versions={"torch": torch.__version__, "triton": version("triton")},
        date=datetime.now(UTC).date().isoformat(),
        note="; ".join(filter(None, (tried, note))),
    )
    size = workload.max_num_tokens
    return {
        phase: TableEntry(shape_key(config, phase, size, config.max_sms), launch, evidence)
        for phase, launch in outcome.best.items()
    }


class Searchers:
    """Processes that search, one for each rank: the same for all points, new ones after one has failed.

    Args:
        num_ranks: of all points. timeout_secs: of one search.
    """

    def __init__(self, num_ranks: int, timeout_secs: float) -> None:
        self._num_ranks, self._timeout_secs = num_ranks, timeout_secs
        self._pool: RankPool | None = None

    def run(self, *args: Any) -> tuple[Outcome, str]:
        """Returns the outcome of search_point with these arguments, and the pool's note. Raises RankFailure."""
        if self._pool is None:
            self._pool = RankPool(self._num_ranks, device="cuda", timeout_secs=self._timeout_secs)
        try:
            return self._pool.run(search_point, *args)[0], self._pool.note
        except RankFailure:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def tune_point(
    workload: Workload, searchers: Searchers, settings: TimingSettings, budget_secs: float, output: Path
) -> Outcome | str:
    """Searches for one workload on GPUs and writes the result.

    Args:
        workload: the size. searchers: the ranks. settings: how a trial is timed.
        budget_secs: seconds in which the search may begin trials.
        output: folder of the tables.

    Returns:
        The outcome, or why there is none.
    """
    try:
        outcome, note = searchers.run(workload, settings, budget_secs)
    except RankFailure as failure:
        return f"{_point_text(workload)}: {failure}"
    for phase, entry in entries_of(outcome, note).items():
        tables.write_table(output / tables.table_name(outcome.arch, workload.world_size, phase), phase, [entry])
    return outcome


def check_can_tune(num_ranks: int) -> None:
    """Checks that this machine can measure so many ranks.

    Raises:
        UnsupportedError: there is no GPU, or one rank.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise UnsupportedError(
            "GPUs to tune on: launch numbers are for GPUs, and times in Triton's interpreter say nothing about them",
            "none that torch can use",
            "Run this where the engine will run, or use the tables in configs/.",
        )
    if num_ranks < 2:
        raise UnsupportedError("2 ranks at least", str(num_ranks), "Say --ranks; ranks may share a GPU.")
