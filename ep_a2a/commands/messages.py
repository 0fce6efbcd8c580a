"""Says what stands beside a command's result, on stderr: notes, files written, errors; knows how much is to be said."""

from __future__ import annotations

import enum
import errno
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from ep_a2a.errors import ConfigError, EpA2AError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

EXIT_OK, EXIT_MISMATCH, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = {
    EXIT_OK: "it worked",
    EXIT_MISMATCH: "it ran and found a mismatch: wrong results, or something that prevents use",
    EXIT_ERROR: "it cannot be done: a wrong option or variable, a missing package, a file that cannot be written",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}
"""Exit codes of all commands, as --help and docs/cli.md list them."""
USUAL_COLUMNS = 80
NARROW_COLUMNS = 50
"""Below this width an error is plain lines: a panel would hold a word or two per line."""

FIELD_OPTIONS = {
    "hidden_dim": ("--hidden",),
    "token_hidden_size": ("--hidden",),
    "topk": ("--topk",),
    "num_experts_per_token": ("--topk",),
    "num_experts": ("--experts",),
    "num_local_experts": ("--experts",),
    "num_experts_per_rank": ("--experts",),
    "num_tokens": ("--tokens", "--max-tokens"),
    "max_num_tokens": ("--max-tokens", "--tokens"),
    "max_num_tokens_per_dp_rank": ("--max-tokens", "--tokens"),
    "max_num_inp_token_per_rank": ("--max-tokens", "--tokens"),
    "max_total_recv_tokens": ("--max-total-recv-tokens",),
    "flagged_max_tokens": ("--flagged-max-tokens",),
    "world_size": ("--ranks",),
    "num_ep_ranks": ("--ranks",),
    "num_ranks": ("--ranks",),
    "gpu_per_node": ("--gpus-per-node",),
    "gpus_per_node": ("--gpus-per-node",),
    "quant_type": ("--quant",),
    "dispatch_quant_type": ("--quant",),
    "combine_quant": ("--combine-quant",),
    "scale_format": ("--scale-format",),
    "max_sms": ("--max-sms",),
    "nic_gbps": ("--nic-gbps",),
    "chunk_tokens": ("--chunk-tokens",),
    "num_credits": ("--credits",),
    "data_parallel_size": ("--data-parallel-size",),
    "tensor_parallel_size": ("--tensor-parallel-size",),
}
"""Options that set a field of a configuration or workload; a command's first one of them is named in errors."""
_FIELD = re.compile(rf"(?<![-\w.'])({'|'.join(FIELD_OPTIONS)})(?!\w)")
FIRST_WORDS = {
    "dtype": "--dtype",
    "layout": "--layout",
    "routing": "--routing",
    "contenders": "--contenders",
    "a backend": "--backend or EP_A2A_BACKEND",
}
"""What the beginning of an error stands for; elsewhere these are ordinary words."""
_FIRST = re.compile(rf"^({'|'.join(FIRST_WORDS)})(?= to be | out of )")


class Verbosity(enum.IntEnum):
    """How much a command says: results only; notes and progress, too; details, too."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


@dataclass
class _Invocation:
    """The command that this process runs, for its messages."""

    verbosity: Verbosity = Verbosity.NORMAL
    command: str = "ep-a2a"
    options: frozenset[str] = frozenset()


_invocation = _Invocation()


def begin(command: str, options: Collection[str], verbosity: Verbosity) -> None:
    """Notes which command runs, its options as they are typed, and how much it shall say."""
    _invocation.command, _invocation.options, _invocation.verbosity = command, frozenset(options), verbosity


def is_quiet() -> bool:
    """Whether only results and errors are to be printed: --quiet."""
    return _invocation.verbosity is Verbosity.QUIET


def is_verbose() -> bool:
    """Whether details are to be printed: --verbose."""
    return _invocation.verbosity is Verbosity.VERBOSE


class OutputConsole(Console):
    """A console of rich whose closed pipe is an error of the command, not a silent exit."""

    def on_broken_pipe(self) -> NoReturn:
        """Raises the BrokenPipeError that rich has caught."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def output() -> OutputConsole:
    """Returns a console for results: stdout, in the colours and width of its terminal."""
    console = OutputConsole()
    # COLUMNS=0, which some systems of continuous integration set, would print nothing.
    return console if console.width > 0 else OutputConsole(width=USUAL_COLUMNS)


def notices() -> OutputConsole:
    """Returns a console for notes and progress: stderr, silent with --quiet."""
    return OutputConsole(stderr=True, quiet=is_quiet())


def note(text: str, style: str = "dim") -> None:
    """Prints a line on stderr unless --quiet is given."""
    notices().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Prints a line on stderr, with --quiet, too."""
    OutputConsole(stderr=True).print(text, style="bold yellow", markup=False, highlight=False, soft_wrap=True)


def confirm(path: Path) -> None:
    """Says on stderr that a file has been written, unless --quiet is given."""
    note(f"written: {path}")


def print_json(values: Any) -> None:
    """Prints one JSON object on stdout."""
    sys.stdout.write(json.dumps(values, indent=2) + "\n")


def show_error(error: EpA2AError) -> None:
    """Prints an error on stderr, in the words of the command line: what was expected, what was found, what to do."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    console = OutputConsole(stderr=True)
    parts = (
        ("expected", as_typed(error.expected)),
        ("got", as_typed(error.got)),
        ("remedy", remedy_of(error)),
        ("see", error.section),
    )
    if console.width < NARROW_COLUMNS:
        for label, text in ((type(error).__name__, ""), *parts):
            console.print(f"{label}: {text}".rstrip(), markup=False, highlight=False, soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    # Folded, not cut: paths and names are longer than a line.
    grid.add_column(overflow="fold")
    for label, text in parts:
        # Text, not markup: error texts contain shapes in square brackets.
        grid.add_row(Text(label, style="bold"), Text(text))
    console.print(Panel(grid, title=type(error).__name__, title_align="left", border_style="red"))


def remedy_of(error: EpA2AError) -> str:
    """Returns what the reader can do, by options where the error speaks of a configuration's fields."""
    if isinstance(error, ConfigError) and error.remedy == ConfigError.remedy:
        return f"Correct the option; `{_invocation.command} --help` says what it takes."
    return as_typed(error.remedy)


def as_typed(text: str) -> str:
    """Returns a text in which fields of configurations are replaced by the command's options for them."""

    def option(found: re.Match[str]) -> str:
        return next((name for name in FIELD_OPTIONS[found[1]] if name in _invocation.options), found[1])

    def first(found: re.Match[str]) -> str:
        named = FIRST_WORDS[found[1]]
        return named if named.partition(" ")[0] in _invocation.options else found[1]

    return _FIRST.sub(first, _FIELD.sub(option, text))
