"""Reads TOML files that choose a backend (configs/*.toml), and says which choice counts."""

import tomllib
from pathlib import Path

from ep_a2a import env
from ep_a2a.errors import ConfigError, did_you_mean, shown
from ep_a2a.whole_files import read_file

DEFAULT_BACKEND = "ep_a2a"
KEYS = ("all2all_backend",)
"""Of a config file: all2all_backend is the backend of EP groups."""


def read_config_file(path: str | Path) -> dict[str, str]:
    """Reads a config file; returns its values by key, out of KEYS.

    Raises:
        ConfigError: the file cannot be read or parsed, has an unknown key, or a value of the wrong type.
    """
    values = read_file(path, "a readable TOML file", "Correct config_file or EP_A2A_CONFIG.", tomllib.loads)
    for key, value in values.items():
        if key not in KEYS:
            remedy = did_you_mean(key, KEYS) or "Remove the key."
            raise ConfigError(f"only the keys {', '.join(KEYS)} in {path}", shown(key), remedy)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{key} in {path} to be a name", shown(value))
    return values


def choose_backend(argument: str | None = None, config_file: str | Path | None = None) -> str:
    """Returns the backend's name: the argument, else the config file, else EP_A2A_BACKEND, else "ep_a2a".

    Args:
        argument: the caller's choice.
        config_file: path of a config file; None takes EP_A2A_CONFIG, and no file if that is unset.

    Raises:
        ConfigError: the config file is wrong. It is read even where the argument decides.
    """
    path = config_file or env.CONFIG.get()
    from_file = read_config_file(path).get("all2all_backend") if path else None
    return argument or from_file or env.BACKEND.get() or DEFAULT_BACKEND
