"""Writes numbers with the unit that keeps them short."""

from __future__ import annotations

UNITS = ("KiB", "MiB", "GiB", "TiB")


def bytes_text(num_bytes: int) -> str:
    """Returns a number of bytes as text, for example "1.5 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, units = num_bytes / 1024, list(UNITS)
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}"


def duration_text(seconds: float) -> str:
    """Returns a time as text, for example "8.1 µs", "12.5 ms", "3.0 s"."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.1f} {unit}"
    return f"{seconds * 1e6:.1f} µs"
