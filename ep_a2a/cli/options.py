"""Options that commands share, and helpers to declare others, in typer's words."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ep_a2a.commands.options import Device, Quant

MOST_HIDDEN, MOST_PLANNED = 1 << 20, 1 << 40
MOST_TOKENS = 1 << 24
MOST_EXPERTS = 1 << 16
MOST_TOPK = 1 << 10
MOST_RANKS = 1 << 12
MOST_PROCESSES = 1 << 10
MOST_ITERATIONS = 1 << 24
MOST_DIGITS = 18
MOST_SEED = (1 << 31) - 1
"""Bounds of options: far above what any machine can do, so that a slip of the keyboard is an error at once."""


def number(text: str, most: int, *, least: int = 1) -> Any:
    """Declares an option that takes a whole number from `least` to `most`."""
    return typer.Option(help=text, min=least, max=most, metavar="N")


def numbers(text: str, most: int = MOST_TOKENS, *typed: str, least: int = 0) -> Any:
    """Declares an option that takes whole numbers separated by commas, each from `least` to `most`."""
    return typer.Option(*typed, help=text, metavar="N,...", parser=lambda value: read_numbers(value, least, most))


def names(text: str) -> Any:
    """Declares an option that takes names separated by commas, each once."""
    return typer.Option(help=text, metavar="NAME,...", parser=read_names)


def read_numbers(text: str, least: int, most: int) -> tuple[int, ...]:
    """Returns the whole numbers between commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= MOST_DIGITS and least <= int(part) <= most for part in parts):
        raise typer.BadParameter(f"{text[:80]!r} is no list of numbers from {least} to {most} with commas between")
    return tuple(map(int, parts))


def read_names(text: str) -> tuple[str, ...]:
    """Returns the names between commas."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts) or len(set(parts)) < len(parts):
        raise typer.BadParameter(f"{text[:80]!r} is no list of names, each once, with commas between")
    return parts


Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print results only: no notes, no progress.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print details; log at INFO unless the level is set.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Output = Annotated[Path | None, typer.Option(help="Write what --json prints to this file.")]
Seed = Annotated[int | None, number("Seed of all that is random.", MOST_SEED, least=0)]
OnDevice = Annotated[Device, typer.Option(help="auto takes GPUs where there are any.")]
Cast = Annotated[Quant, typer.Option(help="Cast inside dispatch.")]
