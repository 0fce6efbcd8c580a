"""Progress of long work: lines where nobody watches, a bar on a terminal."""

import io
from typing import Any

from rich.console import Console

from ep_a2a.commands.progress import Progress


def run_two_parts(console: Console) -> str:
    with Progress("testing", 2, console) as progress:
        for part in ("ranks 0 and 1", "ranks [0] and 2"):
            progress.begin(part)
            progress.end(f"{part}: right")
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def console_of(**options: Any) -> Console:
    return Console(file=io.StringIO(), width=100, **options)


def test_without_a_terminal_each_part_is_a_line() -> None:
    assert run_two_parts(console_of()) == "1/2 ranks 0 and 1: right\n2/2 ranks [0] and 2: right\n"


def test_a_terminal_has_a_bar_that_names_the_part_and_goes_at_the_end() -> None:
    console = console_of(force_terminal=True, color_system=None)
    text = run_two_parts(console)
    for part in ("testing: ranks 0 and 1", "2/2", "ranks [0] and 2: right"):
        assert part in text
    # the last thing that is written removes the bar's line
    assert text.endswith(("\x1b[2K", "\x1b[?25h"))


def test_a_quiet_console_shows_nothing() -> None:
    assert run_two_parts(console_of(quiet=True)) == ""
    assert run_two_parts(console_of(quiet=True, force_terminal=True)) == ""
