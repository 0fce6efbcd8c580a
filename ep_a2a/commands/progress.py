"""Shows how far long work is, on stderr: a bar on a terminal, and a line for each part."""

from rich import progress
from rich.console import Console
from rich.text import Text


class Progress(progress.Progress):
    """Progress of work in parts of known number; a context manager.

    Args:
        what: the work, in a few words.
        num_parts: of the work.
        console: where to show it; a quiet one shows nothing.
    """

    def __init__(self, what: str, num_parts: int, console: Console) -> None:
        columns = (
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
        )
        # The bar goes when the work has ended: the result is what stays.
        disable = not console.is_terminal
        super().__init__(*columns, console=console, transient=True, redirect_stdout=False, disable=disable)
        self._what, self._num_parts, self._bar = what, num_parts, self.add_task(what, total=num_parts)

    def begin(self, part: str) -> None:
        """Names the part that begins, beside the bar."""
        self.update(self._bar, description=f"{self._what}: {part}", refresh=True)

    def end(self, result: str, style: str = "dim") -> None:
        """Counts a part as ended and prints a line with its result."""
        self.advance(self._bar)
        text = f"{self.tasks[0].completed:.0f}/{self._num_parts} {result}"
        # Text: a style of print itself would reach the bar, too
        self.console.print(Text(text, style=style), soft_wrap=True)
