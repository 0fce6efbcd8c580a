"""Shows how far long work is, on stderr: a bar on a terminal, else a line for each part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar


class Progress:
    """Progress of work in parts of known number; a context manager.

    Args:
        what: the work, in a few words.
        num_parts: of the work.
        console: where to show it; a quiet one shows nothing.
    """

    def __init__(self, what: str, num_parts: int, console: Console) -> None:
        self._what, self._num_parts, self._console = what, num_parts, console
        self._num_ended = 0
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=20))
            # the bar goes when the work has ended: the result is what stays
            self._bar = Bar(
                *columns,
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                redirect_stdout=False,
            )
            self._bar.add_task(self._what, total=self._num_parts)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, part: str) -> None:
        """Names the part that begins, beside the bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"{self._what}: {part}", refresh=True)

    def end(self, result: str, style: str = "dim") -> None:
        """Counts a part as ended and prints a line with its result."""
        self._num_ended += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._num_ended)
        text = f"{self._num_ended}/{self._num_parts} {result}"
        # Text: a style of print itself would reach the bar, too
        self._console.print(Text(text, style=style), soft_wrap=True)
