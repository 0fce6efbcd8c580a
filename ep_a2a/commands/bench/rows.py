"""Holds the result of one contender at one point, and computes the columns of reports from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contenders import LIMIT, NATIVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.commands.measure.timing import Timing
    from ep_a2a.commands.measure.workload import Workload

PHASES = ("dispatch", "combine", "round_trip")
HOST_TIMES = ("dispatch_host_us", "combine_host_us")
MAX_REASON_CHARACTERS = 500


class Status(enum.StrEnum):
    """Status of a row.

    OK: checked and timed. UNAVAILABLE: the contender cannot run here, or not this workload. FAILED: its result was
    wrong, so it was not timed. ERROR: it raised.
    """

    OK = "ok"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    ERROR = "error"


@dataclass(frozen=True)
class Row:
    """One contender at one point.

    Attributes:
        workload, contender: of the row.
        status: see Status. reason: why it has no times; "" where it has.
        timing: None unless status is OK.
        details: the session's remarks.
    """

    workload: Workload
    contender: str
    status: Status
    reason: str = ""
    timing: Timing | None = None
    details: dict[str, Any] = field(default_factory=dict)
    note: str = ""


def shown_name(contender: str, device: str) -> str:
    """Returns a contender's name in reports: on CPU torch.distributed's collectives run over gloo, not NCCL."""
    return contender.replace("nccl_", "gloo_", 1) if device == "cpu" and contender.startswith("nccl_") else contender


def is_baseline(contender: str) -> bool:
    """Returns whether reports compare others with this contender: neither the limit nor one of this package's."""
    return contender != LIMIT and not contender.startswith((NATIVE, "ep_low_latency"))


def make_records(rows: Sequence[Row], device: str = "cuda") -> list[dict[str, Any]]:
    """Returns the rows of one point as JSON objects, each marked with the device, "cpu" or "cuda".

    Besides the fields of the workload, of the row and of its timing (`dispatch_us`, `dispatch_p99_us`, ...):

    dispatch_bytes, combine_bytes: bytes that the busiest rank must send or receive; one row per token and rank.
    dispatch_gb_per_s, ...: those bytes per time, in 1e9 bytes per second, even if the contender sent more.
    dispatch_fraction_of_limit, ...: the limit's time by this one's.
    baselines_over_this: each baseline's round trip by this contender's; above 1 this contender is faster.

    round_trip_cold_us: of a single round trip behind a flush of the L2; null where none was timed, as on CPU.

    Other unknown columns are absent, and on CPU all rates and ratios, which would say nothing about GPUs.
    """
    times = {row.contender: _times_us(row.timing) for row in rows if row.timing is not None}
    return [{**_record(row, times, compares=device != "cpu"), "device": device} for row in rows]


def _record(row: Row, times: dict[str, dict[str, float]], *, compares: bool) -> dict[str, Any]:
    workload, timing = row.workload, row.timing
    moved = {"dispatch": workload.dispatch_bytes, "combine": workload.combine_bytes}
    record = {"record": "row"} | workload.as_row() | {"contender": row.contender, "status": row.status.value}
    record |= {f"{phase}_bytes": num_bytes for phase, num_bytes in moved.items()}
    record |= {"reason": row.reason} if row.reason else {}
    record |= {"details": row.details} if row.details else {}
    record |= {"note": row.note} if row.note else {}
    if timing is None:
        return record
    own = times[row.contender]
    for phase in PHASES:
        record |= {f"{phase}_us": own[phase], f"{phase}_p99_us": getattr(timing, phase).p99_us}
    cold = timing.round_trip_cold
    record["round_trip_cold_us"] = None if cold is None else cold.p50_us
    if compares:
        record |= _comparisons(row.contender, moved, times)
    host = {name: getattr(timing, name) for name in HOST_TIMES}
    return record | {"in_graph": timing.in_graph} | {name: us for name, us in host.items() if us is not None}


def _comparisons(contender: str, moved: dict[str, int], times: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Returns rates, fractions of the limit, and ratios to baselines."""
    own, found = times[contender], {}
    for phase in PHASES:
        # bytes per microsecond are megabytes per second
        found[f"{phase}_gb_per_s"] = moved.get(phase, sum(moved.values())) / own[phase] / 1e3
        if LIMIT in times:
            found[f"{phase}_fraction_of_limit"] = times[LIMIT][phase] / own[phase]
    ratios = {
        name: others["round_trip"] / own["round_trip"]
        for name, others in times.items()
        if is_baseline(name) and name != contender
    }
    return {**found, "baselines_over_this": ratios}


def _times_us(timing: Timing) -> dict[str, float]:
    return {phase: getattr(timing, phase).p50_us for phase in PHASES}
