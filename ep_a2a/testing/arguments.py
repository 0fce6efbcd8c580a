"""Arguments of programs that run ranks: what is wrong ends them with one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from ep_a2a.errors import EpA2AError, without_section
from ep_a2a.testing.launch import RankFailure

if TYPE_CHECKING:
    from collections.abc import Iterator


MOST_RANKS = 64


def positive(text: str) -> int:
    """Returns an integer of at least 1, as `type=` of an argument.

    Raises:
        argparse.ArgumentTypeError: text is something else.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return number


def rank_count(text: str) -> int:
    """Returns a number of processes to start on this host, as `type=` of an argument; raises as `positive`."""
    number = positive(text)
    if number > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_RANKS} processes, got {text}")
    return number


@contextlib.contextmanager
def refused_in_one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Ends the program with a line and exit code 2 where this package refuses what was given, here or on all ranks."""
    try:
        yield
    except EpA2AError as error:
        parser.error(without_section(str(error)))
    except RankFailure as failure:
        if failure.expected_error is None:
            raise
        parser.error(without_section(str(failure.expected_error)))
