"""Numbers with their units."""

from __future__ import annotations

import pytest

from ep_a2a.commands.units import bytes_text, duration_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.12e-6, "8.1 µs"), (0.001, "1.0 ms"), (0.0125, "12.5 ms"), (3.04, "3.0 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
