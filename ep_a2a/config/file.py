"""Reads TOML files that choose a backend (configs/*.toml), and says which choice counts."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from ep_a2a import env
from ep_a2a.errors import ConfigError, did_you_mean

DEFAULT_BACKEND = "ep_a2a"


@dataclass(frozen=True)
class FileConfig:
    """Values of a config file; its keys are these names.

    Attributes:
        all2all_backend: backend of EP groups, or None.
    """

    all2all_backend: str | None = None


def read_config_file(path: str | Path) -> FileConfig:
    """Reads a config file.

    Raises:
        ConfigError: the file cannot be read or parsed, has an unknown key, or a value of the wrong type.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        found = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        remedy = "Correct config_file or EP_A2A_CONFIG."
        raise ConfigError(f"a readable TOML file at {path}", found, remedy) from error
    known = [field.name for field in fields(FileConfig)]
    for key, value in values.items():
        if key not in known:
            remedy = did_you_mean(key, known) or "Remove the key."
            raise ConfigError(f"only the keys {', '.join(known)} in {path}", repr(key), remedy)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{key} in {path} to be a name", repr(value))
    return FileConfig(**values)


def choose_backend(argument: str | None = None, config_file: str | Path | None = None) -> str:
    """Returns the backend's name: the argument, else the config file, else EP_A2A_BACKEND, else "ep_a2a".

    Args:
        argument: the caller's choice.
        config_file: path of a config file; None takes EP_A2A_CONFIG, and no file if that is unset.

    Raises:
        ConfigError: the config file is wrong. It is read even where the argument decides.
    """
    path = config_file or env.CONFIG.get()
    from_file = read_config_file(path).all2all_backend if path else None
    return argument or from_file or env.BACKEND.get() or DEFAULT_BACKEND
