"""Values of options: lists separated by commas, files to write, options that do not go together."""

from pathlib import Path
from typing import Any

OPTIONS = {"hidden_dim": "hidden", "cast": "quant", "num_credits": "credits"}
"""Options whose parameters are called otherwise."""
REMEDY = "Correct the option; --help says what it takes."


def texts(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def distinct(option: str, text: str) -> tuple[str, ...]:
    """Names separated by commas.

    Raises:
        ConfigError: there is none, or one stands twice.
    """
    from ep_a2a.errors import ConfigError

    parts = texts(text)
    if not parts or len(set(parts)) < len(parts):
        raise ConfigError(f"--{option} to be one name or more, each once, separated by commas", repr(text), REMEDY)
    return parts


def numbers(option: str, text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers separated by commas, or the default where there is no text.

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
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: dict[str, Any], when: str, remedy: str) -> None:
    """Raises ConfigError where any of the options is given."""
    from ep_a2a.errors import ConfigError

    named = ", ".join(f"--{OPTIONS.get(name, name).replace('_', '-')}" for name in given(options))
    if named:
        raise ConfigError(f"no {named} {when}", named, remedy)
