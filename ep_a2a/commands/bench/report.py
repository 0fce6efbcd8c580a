"""Reports a sweep: its origin, JSON lines, its table, and the same table in markdown."""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ep_a2a
from ep_a2a.commands.bench.contenders import LIMIT, WITHOUT_EFFECT_ON_LIMIT
from ep_a2a.commands.bench.rows import HOST_TIMES, Status, is_baseline, shown_name
from ep_a2a.commands.files import write_text
from ep_a2a.commands.markdown import table_lines
from ep_a2a.commands.programs import command_output, package_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

CPU_NOTE = "functional check: on CPU, in Triton's interpreter, times say nothing about GPUs"
CONTENDER = "contender"
"""Heading of the last column that names a row; those before it are the fields that vary."""

Record = dict[str, Any]

FIELDS = {
    "world_size": "EP",
    "num_tokens": "T",
    "max_num_tokens": "M",
    "hidden_dim": "H",
    "topk": "K",
    "num_experts": "experts",
    "dtype": "dtype",
    "quant_type": "dispatch cast",
    "combine_quant": "combine cast",
    "layout": "layout",
    "routing": "routing",
    "max_sms": "max SMs",
    "gpus_per_node": "GPUs per node",
    "seed": "seed",
}
"""Fields of a workload and their headings."""
TIMES: dict[str, Callable[[Record], str]] = {
    "dispatch µs": lambda record: f"{record['dispatch_us']:.1f}",
    "combine µs": lambda record: f"{record['combine_us']:.1f}",
    "round trip µs": lambda record: f"{record['round_trip_us']:.1f}{'' if record['in_graph'] else ' eager'}",
    "p99 µs": lambda record: f"{record['round_trip_p99_us']:.1f}",
    "host µs": lambda record: "/".join(f"{record[name]:.1f}" for name in HOST_TIMES if name in record),
    "GB/s": lambda record: f"{record['dispatch_gb_per_s']:.3g}/{record['combine_gb_per_s']:.3g}",
    "of limit": lambda record: _if_known("{:.1%}", record.get("round_trip_fraction_of_limit")),
}
"""Cells of a contender that was timed, by heading."""
COLD = {"cold µs": lambda record: _if_known("{:.1f}", record.get("round_trip_cold_us"))}
"""The same of round trips behind a flush of the L2, where any was timed."""
EXPLANATION = (
    "µs: median over runs, maximum over ranks; p99 and GB/s as in commands/bench/rows.py. host µs: dispatch/combine. "
    "GB/s: dispatch/combine, counting one row per token and rank. of limit: wire_limit's round trip by this one's. "
    "cold: a single round trip behind a flush of the L2."
)
CPU_EXPLANATION = "right: every rank's rows and sums are those of the reference. The JSON rows have the raw times."


def describe(device: str) -> dict[str, Any]:
    """Returns versions, machine, commit, command and time, for the first line of a report. Makes no CUDA context.

    Args:
        device: "cpu" or "cuda".
    """
    record: dict[str, Any] = {
        "record": "header",
        "ep_a2a": ep_a2a.__version__,
        "commit": commit(),
        "command": " ".join(["ep-a2a", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
    }
    if device == "cpu":
        return record | {"note": CPU_NOTE, "cpu": platform.processor() or platform.machine()}
    gpus = command_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return record | {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "driver": ", ".join(sorted({line.rpartition(", ")[2] for line in gpus})),
        "gpus": [line.rpartition(", ")[0] for line in gpus],
    }


def commit() -> str | None:
    """Returns the commit of this package's checkout, "-dirty" with changes on top; None where there is none."""
    root = Path(ep_a2a.__file__).resolve().parents[1]
    # an installed package may lie inside the checkout of another project
    if not (root / ".git").exists():
        return None
    describe_commit = ("describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    return command_output("git", "-C", str(root), *describe_commit).strip() or None


class JsonLines:
    """A file of JSON lines that grows with the sweep: always whole, so that an end of the process keeps earlier rows.

    Args:
        path: the file; earlier content is replaced.
        header: its first line.
    """

    def __init__(self, path: Path, header: Record) -> None:
        self._path = path
        self._text = ""
        self.append([header])

    def append(self, records: Iterable[Record]) -> None:
        """Adds a line per record."""
        self._text += "".join(json.dumps(record) + "\n" for record in records)
        write_text(self._path, self._text, confirms=False)


def varying_fields(records: Sequence[Record]) -> list[str]:
    """Returns the fields of the workload that differ between records.

    num_tokens is always among them, max_num_tokens only where a record has another one than num_tokens.
    """
    differing = [name for name in FIELDS if len({record[name] for record in records}) > 1 or name == "num_tokens"]
    return [name for name in differing if name != "max_num_tokens" or not _bounds_are_tokens(records)]


def _bounds_are_tokens(records: Sequence[Record]) -> bool:
    return all(record["max_num_tokens"] == record["num_tokens"] for record in records)


def constant_fields(records: Sequence[Record]) -> str:
    """Returns the fields that all records have in common, as text."""
    varying = varying_fields(records)
    constant = {name: records[0][name] for name in FIELDS if name not in varying}
    if _bounds_are_tokens(records):
        constant["max_num_tokens"] = "= T"
    return ", ".join(f"{FIELDS[name]} {value}" for name, value in constant.items())


def has_effect(record: Record, field: str) -> bool:
    """Returns whether a field of the workload makes a difference to the record's contender."""
    without_effect = WITHOUT_EFFECT_ON_LIMIT - record.get("details", {}).keys()
    return record["contender"] != LIMIT or field not in without_effect


def make_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns headings and cells: what varies, times, bandwidth, fraction of the limit, ratio to each baseline.

    On CPU only whether results are right stands in their place. Contenders that were not available are left out;
    `reasons` has them.
    """
    shown = _without_repeats([record for record in records if record["status"] != Status.UNAVAILABLE])
    varying = varying_fields(records)
    headings = [*(FIELDS[name] for name in varying), CONTENDER]
    if is_functional_check(records):
        headings.append("result")
        rows = [[*_names(record, varying), _result(record)] for record in shown]
    else:
        timed = dict.fromkeys(record["contender"] for record in shown if record["status"] == Status.OK)
        baselines = [name for name in timed if is_baseline(name)]
        is_cold = any(record.get("round_trip_cold_us") is not None for record in shown)
        columns = TIMES | (COLD if is_cold else {})
        headings += [*columns, *(f"{name} ÷ this" for name in baselines)]
        rows = [[*_names(record, varying), *_times(record, columns, baselines)] for record in shown]
    crossing = [_rows_between_nodes(record) for record in shown]
    if any(crossing):
        headings.append("rows between nodes")
        rows = [[*row, cell] for row, cell in zip(rows, crossing)]
    return headings, rows


def _rows_between_nodes(record: Record) -> str:
    details = record.get("details", {})
    padding = details.get("padding_between_nodes", 0)
    return f"{details.get('rows_between_nodes', '')}" + (f" + {padding} empty" if padding else "")


def _without_repeats(records: Sequence[Record]) -> list[Record]:
    """Returns the records without those of the limit that repeat an earlier one."""
    kept: dict[Any, Record] = {}
    for number, record in enumerate(records):
        key = tuple(record[name] for name in FIELDS if has_effect(record, name))
        kept.setdefault(key if record["contender"] == LIMIT else number, record)
    return list(kept.values())


def is_functional_check(records: Iterable[Record]) -> bool:
    """Returns whether the records are from CPU, where their times say nothing."""
    return any(record["device"] == "cpu" for record in records)


def _names(record: Record, varying: Sequence[str]) -> list[str]:
    name = shown_name(record["contender"], record["device"])
    return [*(str(record[field]) if has_effect(record, field) else "" for field in varying), name]


def _result(record: Record) -> str:
    status: str = record["status"]
    return "right" if status == Status.OK else status.upper()


def _times(record: Record, columns: dict[str, Callable[[Record], str]], baselines: Sequence[str]) -> list[str]:
    if record["status"] != Status.OK:
        return [record["status"].upper(), *[""] * (len(columns) + len(baselines) - 1)]
    ratios = [_if_known("{:.2f}", record["baselines_over_this"].get(name)) for name in baselines]
    return [*(cell(record) for cell in columns.values()), *ratios]


def _if_known(form: str, number: float | None) -> str:
    return "" if number is None else form.format(number)


def reasons(records: Iterable[Record]) -> list[str]:
    """Returns why contenders have no times, each reason once."""
    found: dict[tuple[str, str, str], dict[int, None]] = {}
    for record in records:
        if record["status"] != Status.OK:
            key = shown_name(record["contender"], record["device"]), record["status"], record["reason"]
            found.setdefault(key, {})[record["num_tokens"]] = None
    return [
        f"{contender} {status} (T = {', '.join(map(str, tokens))}): {reason}"
        for (contender, status, reason), tokens in found.items()
    ]


def explanation(records: Iterable[Record]) -> str:
    """Returns what the columns of the table mean."""
    return CPU_EXPLANATION if is_functional_check(records) else EXPLANATION


def write_markdown(path: Path, header: Record, records: Sequence[Record]) -> None:
    """Writes the table and its origin, in the form of bench/results."""
    headings, rows = make_table(records)
    about = [f"- {name}: {value}" for name, value in header.items() if name != "record"]
    lines = ["# ep-a2a bench", "", *about, f"- in all rows: {constant_fields(records)}", ""]
    lines += [
        *table_lines(headings, rows),
        "",
        explanation(records),
        "",
        *(f"- {reason}" for reason in reasons(records)),
    ]
    write_text(path, "\n".join(lines).rstrip() + "\n")
