"""Times two checkouts in turn with the same `ep-a2a bench`, and compares their medians.

    python tools/ab_bench.py OLD NEW --rounds 5 --json rows.jsonl -- --ranks 2 --layout rank_major --contenders ep_a2a

OLD and NEW are folders with a checkout. `--set FILE:NAME=VALUE`, which may be repeated, gives NEW another value of a
constant, in a copy: so a checkout is compared with itself. Everything behind `--` goes to `ep-a2a bench`. The first run
of each checkout compiles its kernels; its times do not count. Then every round runs OLD and NEW once, in alternating
order. Each figure of a checkout is its median over the rounds. The script exits with 1 where NEW is slower than OLD by
more than `--tolerance` per cent, or where nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIGURES = ("round_trip_us", "round_trip_cold_us", "dispatch_us", "combine_us", "dispatch_host_us", "combine_host_us")
MOVED = ("_bytes", "_rows")
"""Ends of the names of what follows from a workload."""
NAMES = ("old", "new")


def main() -> int:
    """Runs both checkouts and prints the comparison; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=2.0, help="per cent")
    parser.add_argument("--json", type=Path, help="file for the raw rows of all rounds")
    parser.add_argument("--set", action="append", default=[], metavar="FILE:NAME=VALUE", help="a constant of NEW")
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, bench = parser.parse_args(arguments[:at]), arguments[at + 1 :]
    with tempfile.TemporaryDirectory() as copy:
        new = with_constants(options.new.resolve(), options.set, Path(copy))
        return compare(options, dict(zip(NAMES, (options.old.resolve(), new))), bench)


def with_constants(checkout: Path, settings: list[str], copy: Path) -> Path:
    """The checkout, or `copy`, which then gets the checkout's package with these constants."""
    if not settings:
        return checkout
    shutil.copytree(checkout / "ep_a2a", copy / "ep_a2a", ignore=shutil.ignore_patterns("__pycache__"))
    for setting in settings:
        file, name, value = re.fullmatch(r"([^:]+):(\w+)=(.+)", setting).groups()
        text, found = re.subn(rf"^{name} = .*$", f"{name} = {value}", (copy / file).read_text(), flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"{file} sets {name} {found} times, expected once")
        (copy / file).write_text(text)
    return copy


def compare(options: argparse.Namespace, folders: dict[str, Path], bench: list[str]) -> int:
    """Times both folders in turn; the exit code."""
    for folder in folders.values():
        run_bench(folder, bench)
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for name in NAMES if number % 2 == 0 else NAMES[::-1]:
            measured = enumerate(run_bench(folders[name], bench))
            rows += [row | {"checkout": name, "round": number, "place": place} for place, row in measured]
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return report(rows, options.tolerance)


def run_bench(folder: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """The rows that `ep-a2a bench` of a checkout writes."""
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "rows.jsonl"
        command = [sys.executable, "-m", "ep_a2a", "bench", *arguments, "--output", str(output)]
        environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode or not output.exists():
            raise SystemExit(f"{folder}: {' '.join(command)} exited with {done.returncode}\n{done.stdout}{done.stderr}")
        rows = [json.loads(line) for line in output.read_text().splitlines()]
    return [row for row in rows if row["record"] == "row"]


def title_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The contender, and those fields of the workload in which rows differ."""
    workload = list(row)[: list(row).index("contender")]
    varying = [name for name in workload if not name.endswith(MOVED) and len({each.get(name) for each in rows}) > 1]
    return " ".join([row["contender"], *(f"{name}={row[name]}" for name in varying)])


def report(rows: list[dict[str, Any]], tolerance: float) -> int:
    """Prints one line per row of the bench and figure; 1 if a figure of the new checkout is too slow.

    Checkouts may name fields of a workload differently: the same command gives the same rows in the same order.
    """
    too_slow, num_compared = False, 0
    print(f"{'case':56} {'figure':18} {'old':>9} {'new':>9} {'change':>8}   spread of old, new")
    titled = [row for row in rows if row["checkout"] == NAMES[1] and row["round"] == 0]
    for case in titled:
        same = [row for row in rows if (row["place"], row["contender"]) == (case["place"], case["contender"])]
        for figure in FIGURES:
            values = {
                name: [row[figure] for row in same if row["checkout"] == name and row.get(figure)] for name in NAMES
            }
            if not all(values.values()):
                continue
            old, new = (statistics.median(values[name]) for name in NAMES)
            change = 100 * (new / old - 1)
            too_slow |= change > tolerance
            spreads = ", ".join(f"{min(values[name]):.2f}-{max(values[name]):.2f}" for name in NAMES)
            num_compared += 1
            print(f"{title_of(case, titled):56} {figure:18} {old:9.2f} {new:9.2f} {change:+7.1f}%   {spreads}")
    if num_compared == 0:
        print("nothing was compared: no row has figures of both checkouts")
    return 1 if too_slow or num_compared == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
