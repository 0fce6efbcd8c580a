"""Parses and checks option values: choices, lists, files to write, options that exclude each other."""

import enum
from pathlib import Path
from typing import Any

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


def numbers(option: str, text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Returns numbers separated by commas, or the default where there is no text.

    Raises:
        ConfigError: something between the commas is not a number.
    """
    from ep_a2a.errors import ConfigError

    if text is None:
        return default
    parts = texts(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--{option} to be numbers separated by commas, each 0 or more", repr(text), REMEDY)
    return tuple(int(part) for part in parts)


def different_files(*paths: Path | None) -> None:
    """Raises ConfigError where two outputs would go to one file."""
    from ep_a2a.errors import ConfigError

    resolved = [path.resolve() for path in paths if path is not None]
    if len(set(resolved)) < len(resolved):
        raise ConfigError("a file of its own for each output", ", ".join(map(str, resolved)), "Name another.")


def check_folder(path: Path | None) -> None:
    """Raises ConfigError where there is no folder to write `path` into."""
    from ep_a2a.errors import ConfigError

    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(f"a folder {path.resolve().parent}", "none", "Make it, or name another.")


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: dict[str, Any], when: str, remedy: str) -> None:
    """Raises ConfigError where any of the options is given."""
    from ep_a2a.errors import ConfigError

    named = ", ".join(f"--{OPTIONS.get(name, name).replace('_', '-')}" for name in given(options))
    if named:
        raise ConfigError(f"no {named} {when}", named, remedy)
