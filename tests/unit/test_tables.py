"""Tables that keep their figures whole, and numbers with their units."""

import io

import pytest
from rich.console import Console

from ep_a2a.commands.tables import bytes_text, new_table, print_wide


@pytest.mark.parametrize("width", [10, 80])
def test_figures_are_whole_on_any_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    table = new_table("", ("contender", "dispatch"), right=("dispatch",))
    table.add_row("reference_push", "12345.6")
    print_wide(console, table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line for line in lines if "reference_push" in line and " 12345.6 " in line]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")]
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text
