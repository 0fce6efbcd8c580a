"""Options that commands share, and the checks of their values: choices, lists, options that exclude each other."""

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

OPTIONS = {"hidden_dim": "hidden", "cast": "quant", "num_credits": "credits"}
"""Options by parameter, where the names differ."""
REMEDY = "Correct the option; --help says what it takes."


class Device(enum.StrEnum):
    """Values of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Quant(enum.StrEnum):
    """Values of --quant: the casts that act inside dispatch."""

    NONE = "none"
    FP8_PER_TOKEN = "fp8_per_token"
    FP8_PER_1X128 = "fp8_per_1x128"


MOST_HIDDEN = 1 << 20
MOST_PLANNED = 1 << 40
MOST_TOKENS = 1 << 24
MOST_EXPERTS = 1 << 16
MOST_TOPK = 1 << 10
MOST_RANKS = 1 << 12
MOST_PROCESSES = 1 << 10
MOST_ITERATIONS = 1 << 24
MOST_DIGITS = 18
MOST_SECS = 1e6
MOST_SEED = (1 << 31) - 1
"""Bounds of options: far above what any machine can do, so that a slip of the keyboard is an error at once."""


def at_most(most: int, text: str) -> Any:
    """Returns an option that takes a number from 1 to `most`."""
    return typer.Option(min=1, max=most, help=text)


Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print results only: no notes, no progress.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print details; log at INFO unless the level is set.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
OutputFile = Annotated[Path | None, typer.Option("--output", help="Write what --json prints to this file.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of all that is random.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto takes GPUs where there are any.")]
QuantOption = Annotated[Quant, typer.Option("--quant", help="Cast inside dispatch.")]


def texts(text: str) -> tuple[str, ...]:
    """Returns the texts between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def distinct(option: str, text: str) -> tuple[str, ...]:
    """Returns names separated by commas.

    Raises:
        ConfigError: there is none, or one appears twice.
    """
    from ep_a2a.errors import ConfigError

    parts = texts(text)
    if not parts or len(set(parts)) < len(parts):
        raise ConfigError(f"--{option} to be one name or more, each once, separated by commas", repr(text), REMEDY)
    return parts


def numbers(option: str, text: str | None, default: tuple[int, ...], most: int = MOST_TOKENS) -> tuple[int, ...]:
    """Returns numbers separated by commas, or the default where there is no text.

    Raises:
        ConfigError: something between the commas is not a number, or above `most`.
    """
    from ep_a2a.errors import ConfigError

    if text is None:
        return default
    parts = texts(text)
    if not parts or not all(part.isdecimal() and len(part) <= MOST_DIGITS and int(part) <= most for part in parts):
        raise ConfigError(f"--{option} to be numbers separated by commas, each from 0 to {most}", repr(text), REMEDY)
    return tuple(int(part) for part in parts)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: dict[str, Any], when: str, remedy: str) -> None:
    """Raises ConfigError where any of the options is given."""
    from ep_a2a.errors import ConfigError

    named = ", ".join(f"--{OPTIONS.get(name, name).replace('_', '-')}" for name in given(options))
    if named:
        raise ConfigError(f"no {named} {when}", named, remedy)
