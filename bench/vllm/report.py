"""What a measurement is made of, without an engine: order of engines, arithmetic of profiles, rows and their table."""

import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ep_a2a

HOST_BOUND_PERCENT = 10.0
"""Of a step without a kernel on the GPU: above, the host sets the pace, and exchanges cannot be compared by steps."""
KERNELS = Path(ep_a2a.__file__).parent / "kernels"
OURS = {
    name for path in KERNELS.glob("*.py") for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
}
THEIRS = re.compile(r"nccl|deep_ep")


class Kernel(NamedTuple):
    """What ran on a GPU, and when, in microseconds of one clock."""

    name: str
    start_us: float
    end_us: float


def schedule(backends: Sequence[str], rounds: int) -> list[str]:
    """The engines in the order in which they run: A-B-B-A, so that a machine's drift meets all alike."""
    return [*backends, *reversed(backends)] * rounds


def is_exchange(name: str) -> bool:
    """Whether a kernel moves rows between ranks; casts and copies around another library's kernels do not count."""
    return name in OURS or bool(THEIRS.search(name))


def profile(kernels: Iterable[Kernel], num_steps: int, num_layers: int) -> dict[str, float]:
    """Times of a step on one rank's GPU, and of the exchange in a layer; nothing where no kernel was seen.

    A wait inside a kernel counts as busy.
    """
    found = sorted(kernels, key=lambda kernel: kernel.start_us)
    if not found:
        return {}
    busy_us, end_us = 0.0, found[0].start_us
    for kernel in found:
        busy_us += max(0.0, kernel.end_us - max(end_us, kernel.start_us))
        end_us = max(end_us, kernel.end_us)
    wall_us = end_us - found[0].start_us
    exchange_us = sum(kernel.end_us - kernel.start_us for kernel in found if is_exchange(kernel.name))
    return {
        "wall_ms": wall_us / num_steps / 1e3,
        "busy_ms": busy_us / num_steps / 1e3,
        "gap_percent": 100 * (1 - busy_us / wall_us),
        "exchange_us": exchange_us / num_steps / num_layers,
    }


def of_ranks(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One measurement of all ranks.

    `us`: the slowest rank's, of each repeat. The profile is that of the rank with the longest gap; the time of an
    exchange that of the rank that waits least in it.
    """
    us = [round(max(repeat), 1) for repeat in zip(*(report["us"] for report in reports), strict=True)]
    profiles = [report["profile"] for report in reports if report["profile"]]
    if not profiles:
        return {"us": us}
    idlest = max(profiles, key=lambda each: each["gap_percent"])
    found = idlest | {"exchange_us": min(each["exchange_us"] for each in profiles)}
    host_bound = idlest["gap_percent"] > HOST_BOUND_PERCENT
    return {"us": us} | {name: round(each, 3) for name, each in found.items()} | {"host_bound": host_bound}


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})" if values else ""


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per workload and backend: all repeats of all its engines' turns."""
    names = ("wall_ms", "busy_ms", "gap_percent", "exchange_us")
    lines = [f"| workload | backend | us | {' | '.join(names)} | |", "|---" * (4 + len(names)) + "|"]
    rows = [row for row in rows if "error" not in row]
    for key in sorted({(row["workload"], row["backend"]) for row in rows}):
        own = [row for row in rows if (row["workload"], row["backend"]) == key]
        cells = [spread([us for row in own for us in row["us"]])]
        cells += [spread([row[name] for row in own if name in row]) for name in names]
        bound = "host-bound" if any(row.get("host_bound") for row in own) else ""
        lines.append(f"| {' | '.join((*key, *cells, bound))} |")
    return "\n".join(lines) + "\n"
