"""Checks and writes the files that a command is asked for; the system's refusals become errors of this package."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ep_a2a import whole_files
from ep_a2a.commands import messages
from ep_a2a.errors import ConfigError
from ep_a2a.whole_files import resolved

REMEDY = "Name another file, or make room and permissions for this one."


def check_can_write(path: Path | None) -> None:
    """Checks, before any work, that `path` can be written; leaves nothing behind.

    Raises:
        ConfigError: its folder does not exist, it is a folder, its name is too long, or the user may not write there.
        UntrustedFolderError: the path leads through a link of another user.
    """
    if path is None:
        return
    with _as_error(path):
        if path.is_dir():
            raise ConfigError(f"a file to write at {path}", "a folder", "Name a file in it.")
        folder = resolved(path).parent
        if not folder.is_dir():
            raise ConfigError(f"a folder {folder}", "none", "Make it, or name another.")
        whole_files.check_can_write(path)


def write_bytes(path: Path, content: bytes, *, confirms: bool = True) -> None:
    """Puts a file into place whole or not at all.

    Args:
        path: the file. content: what it shall hold. confirms: say on stderr that it has been written.

    Raises:
        ConfigError: it cannot be written: no space, no permission, no folder.
        UntrustedFolderError: the path leads through a link of another user.
    """
    with _as_error(path):
        whole_files.write_whole(path, content)
    if confirms:
        messages.confirm(path)


def give_json(values: Any, output: Path | None, *, as_json: bool) -> None:
    """Writes values as one JSON object to the file of --output and, with --json, to stdout."""
    if output is not None:
        write_bytes(output, (json.dumps(values, indent=2) + "\n").encode())
    if as_json:
        messages.print_json(values)


@contextlib.contextmanager
def _as_error(path: Path) -> Iterator[None]:
    """Lets the system's errors be errors of this package."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"to write {path}", error.strerror or str(error), REMEDY) from error
