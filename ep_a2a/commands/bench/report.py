"""Reports a sweep: JSON lines, a table on the terminal, and the same table in markdown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ep_a2a.commands.bench.contenders import LIMIT, WITHOUT_EFFECT_ON_LIMIT
from ep_a2a.commands.bench.rows import Status, is_baseline

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.console import Console

MAX_TABLE_WIDTH = 1000

Record = dict[str, Any]

FIELDS = {
    "world_size": "EP", "num_tokens": "T", "max_num_tokens": "M", "hidden_dim": "H", "topk": "K",
    "num_experts": "experts", "dtype": "dtype", "quant_type": "dispatch cast", "combine_quant": "combine cast",
    "layout": "layout", "routing": "routing", "max_sms": "max SMs", "gpus_per_node": "GPUs per node", "seed": "seed",
}  # fmt: skip
"""Fields of a workload and their headings."""


class JsonLines:
    """A file of JSON lines that grows with the sweep, so that what was measured survives whatever ends it.

    Args:
        path: the file; what it held is replaced.
        header: its first line.
    """

    def __init__(self, path: Path, header: Record) -> None:
        self._path = path
        path.write_text("", encoding="utf-8")
        self.append([header])

    def append(self, records: Iterable[Record]) -> None:
        """Adds a line per record."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def varying_fields(records: Sequence[Record]) -> list[str]:
    """Fields of the workload that differ between records; num_tokens always, max_num_tokens where it says more."""
    differing = [name for name in FIELDS if len({record[name] for record in records}) > 1 or name == "num_tokens"]
    if _bounds_are_tokens(records):
        differing = [name for name in differing if name != "max_num_tokens"]
    return differing


def _bounds_are_tokens(records: Sequence[Record]) -> bool:
    return all(record["max_num_tokens"] == record["num_tokens"] for record in records)


def constant_fields(records: Sequence[Record]) -> str:
    """Returns the fields that all records have in common, as text."""
    varying = varying_fields(records)
    constant = {name: records[0][name] for name in FIELDS if name not in varying}
    if _bounds_are_tokens(records):
        constant["max_num_tokens"] = "= T"
    return ", ".join(f"{FIELDS[name]} {value}" for name, value in constant.items())


def make_table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: what varies, times, bandwidth, fraction of the limit, ratio to each baseline.

    Contenders that were not available are left out; `reasons` has them.
    """
    shown = _without_repeats([record for record in records if record["status"] != Status.UNAVAILABLE])
    varying = varying_fields(records)
    baselines = [
        name for name in dict.fromkeys(each["contender"] for each in shown if each["status"] == "ok")
        if is_baseline(name)
    ]  # fmt: skip
    headings = [FIELDS[name] for name in varying] + [
        "contender",
        "dispatch µs",
        "combine µs",
        "round trip µs",
        "p99 µs",
    ]
    headings += ["host µs", "GB/s", "of limit", *(f"{name} ÷ this" for name in baselines)]
    rows = [_cells(record, varying, baselines) for record in shown]
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
    """Records without those of the limit that say the same again."""
    kept, seen = [], set()
    for record in records:
        key = tuple(record[name] for name in FIELDS if has_effect(record, name))
        if record["contender"] != LIMIT or key not in seen:
            kept.append(record)
        if record["contender"] == LIMIT:
            seen.add(key)
    return kept


def has_effect(record: Record, field: str) -> bool:
    """Returns whether a field of the workload makes a difference to the record's contender."""
    return record["contender"] != LIMIT or field not in WITHOUT_EFFECT_ON_LIMIT


def _cells(record: Record, varying: Sequence[str], baselines: Sequence[str]) -> list[str]:
    cells = [str(record[name]) if has_effect(record, name) else "" for name in varying] + [record["contender"]]
    if record["status"] != Status.OK:
        return [*cells, record["status"].upper(), *[""] * (7 + len(baselines) - 1)]
    host = "/".join(f"{record[name]:.1f}" for name in ("dispatch_host_us", "combine_host_us") if name in record)
    round_trip = f"{record['round_trip_us']:.1f}" + ("" if record["in_graph"] else " eager")
    ratios = record["baselines_over_this"]
    return [
        *cells,
        f"{record['dispatch_us']:.1f}",
        f"{record['combine_us']:.1f}",
        round_trip,
        f"{record['round_trip_p99_us']:.1f}",
        host,
        f"{record['dispatch_gb_per_s']:.3g}/{record['combine_gb_per_s']:.3g}",
        f"{record['round_trip_fraction_of_limit']:.1%}" if "round_trip_fraction_of_limit" in record else "",
        *(f"{ratios[name]:.2f}" if name in ratios else "" for name in baselines),
    ]


def reasons(records: Iterable[Record]) -> list[str]:
    """Returns why contenders have no times, each reason once."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for record in records:
        if record["status"] != Status.OK:
            key = record["contender"], record["status"], record["reason"]
            found.setdefault(key, []).append(record["num_tokens"])
    return [
        f"{contender} {status} (T = {', '.join(map(str, dict.fromkeys(tokens)))}): {reason}"
        for (contender, status, reason), tokens in found.items()
    ]


def show(console: Console, header: Record, records: Sequence[Record]) -> None:
    """Prints the table, the common fields, and why contenders are missing."""
    from rich.measure import Measurement
    from rich.table import Table

    headings, rows = make_table(records)
    console.print(constant_fields(records), markup=False, highlight=False)
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    for row in rows:
        table.add_row(*row)
    # A table that is squeezed into a narrow terminal loses digits; one that is folded does not.
    options = console.options.update(max_width=MAX_TABLE_WIDTH)
    terminal_width = console.width
    console.width = max(terminal_width, Measurement.get(console, options, table).maximum)
    console.print(table)
    console.width = terminal_width
    for text in [*reasons(records), EXPLANATION]:
        console.print(text, markup=False, highlight=False)
    if "note" in header:
        console.print(header["note"], style="bold yellow", highlight=False)


EXPLANATION = (
    "µs: median over runs, maximum over ranks; p99 and GB/s as in commands/bench/rows.py. host µs: dispatch/combine. "
    "GB/s: dispatch/combine, counting one row per token and rank. of limit: wire_limit's round trip by this one's."
)


def write_markdown(path: Path, header: Record, records: Sequence[Record]) -> None:
    """Writes the table and its origin, in the form of bench/results."""
    headings, rows = make_table(records)
    about = [f"- {name}: {value}" for name, value in header.items() if name != "record"]
    lines = [
        "# ep-a2a bench", "", *about, f"- in all rows: {constant_fields(records)}", "",
        _markdown_row(headings), _markdown_row(["---"] * len(headings)), *map(_markdown_row, rows), "",
        EXPLANATION, "", *(f"- {reason}" for reason in reasons(records)),
    ]  # fmt: skip
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
