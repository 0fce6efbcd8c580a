"""Writes a command's files whole or not at all: into a file beside the wanted one, which then takes its place."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from typing import TYPE_CHECKING, Any

from ep_a2a.commands import messages
from ep_a2a.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REMEDY = "Name another file, or make room and permissions for this one."


def different_files(*paths: Path | None) -> None:
    """Raises ConfigError where two outputs would go to one file."""
    resolved = [path.resolve() for path in paths if path is not None]
    if len(set(resolved)) < len(resolved):
        raise ConfigError("a file of its own for each output", ", ".join(map(str, resolved)), "Name another.")


def check_can_write(path: Path | None) -> None:
    """Checks, before any work, that `path` can be written; leaves nothing behind.

    Raises:
        ConfigError: its folder does not exist, it is a folder, its name is too long, or the user may not write there.
    """
    if path is None:
        return
    with _as_error(path):
        if path.is_dir():
            raise ConfigError(f"a file to write at {path}", "a folder", "Name a file in it.")
        if not path.resolve().parent.is_dir():
            raise ConfigError(f"a folder {path.resolve().parent}", "none", "Make it, or name another.")
        if _is_replaced(path):
            # The name itself is tried, too: it may be longer than the file system takes.
            with contextlib.suppress(FileNotFoundError):
                path.stat()
            temporary = _beside(path.resolve())
            temporary.touch(exist_ok=False)
            temporary.unlink()


def check_folder(path: Path) -> None:
    """Makes a folder for files where there is none, and checks that it takes them.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    with _as_error(path):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"a folder at {path}", "a file", "Name a folder.")
        path.mkdir(parents=True, exist_ok=True)
    check_can_write(path / "x")


@contextlib.contextmanager
def whole_file(path: Path, *, confirms: bool = True) -> Iterator[Path]:
    """Yields where to write what `path` shall hold; puts it there at the end, or removes it after an error.

    Devices and pipes are written to directly. A file that is there keeps its permissions.

    Args:
        path: the file. confirms: say on stderr that it has been written.

    Raises:
        ConfigError: it cannot be written: no space, no permission, no folder.
    """
    with _as_error(path):
        if not _is_replaced(path):
            yield path
        else:
            target = path.resolve()
            temporary = _beside(target)
            try:
                yield temporary
                if target.exists():
                    temporary.chmod(stat.S_IMODE(target.stat().st_mode))
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
    if confirms:
        messages.confirm(path)


def write_text(path: Path, text: str, *, confirms: bool = True) -> None:
    """Writes a text as `whole_file` does."""
    with whole_file(path, confirms=confirms) as place:
        place.write_text(text, encoding="utf-8")


def give_json(values: Any, output: Path | None, *, as_json: bool) -> None:
    """Writes values as one JSON object to the file of --output and, with --json, to stdout."""
    if output is not None:
        write_text(output, json.dumps(values, indent=2) + "\n")
    if as_json:
        messages.print_json(values)


def cannot_write(path: Path | str, error: OSError) -> ConfigError:
    """Returns what a command says where the system refuses to write to a file."""
    return ConfigError(f"to write {path}", error.strerror or str(error), REMEDY)


def cannot_print(error: OSError) -> ConfigError:
    """Returns what a command says where the system refuses to write to standard output."""
    remedy = "Make room where standard output goes."
    if error.errno == errno.EPIPE:
        remedy = "Whoever read the output has closed it. Read all of it, with `less` for example."
    return ConfigError("to write to standard output", error.strerror or str(error), remedy)


@contextlib.contextmanager
def _as_error(path: Path) -> Iterator[None]:
    """Lets the system's errors be errors of this package."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def _is_replaced(path: Path) -> bool:
    """Whether a file can take its place: not that of a device or a pipe."""
    return not path.exists() or path.is_file()


def _beside(path: Path) -> Path:
    # The suffix stays: it names the format of a picture.
    return path.with_name(f".ep_a2a_{os.getpid()}{path.suffix[:16]}")
