"""Builds the wheel, from a copy of what belongs into it: nothing that earlier builds left does. Standard library only.

python tools/build_wheel.py dist
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "LICENSE")
FOLDERS = ("ep_a2a", "configs")
OLDEST_SETUPTOOLS = 77


def build_wheel(folder: Path) -> Path:
    """Writes the wheel into `folder`, in which there is no other, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ep_a2a_wheel_") as name:
        source = Path(name)
        (source / "project").mkdir()
        for file in FILES:
            shutil.copy(PROJECT / file, source / "project")
        (source / "project" / "README.md").write_text(long_description())
        for part in FOLDERS:
            shutil.copytree(PROJECT / part, source / "project" / part, ignore=shutil.ignore_patterns("__pycache__"))
        for old in folder.glob("ep_a2a-*.whl"):
            old.unlink()
        # With its own setuptools where that is new enough: no network is needed then.
        isolation = ["--no-build-isolation"] if has_setuptools() else []
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", *isolation, "--wheel-dir", folder.resolve())
        python = python_with_pip(source / "environment")
        subprocess.run([*map(str, (python, "-m", "pip", "wheel", *options, source / "project"))], check=True)
    (wheel,) = folder.glob("ep_a2a-*.whl")
    return wheel


def long_description() -> str:
    """README.md as a package index can show it: no pictures, nothing of a checkout, links into one are words alone."""
    text = (PROJECT / "README.md").read_text().replace(".venv/bin/", "")
    text = re.sub(r"<!-- checkout -->.*?<!-- end checkout -->\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- wheel: (.*?) -->", r"\1", text)
    text = re.sub(r"(<picture>.*?</picture>|<!--.*?-->)\n*", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


def python_with_pip(folder: Path) -> Path:
    """This Python, or where it has no pip an environment of it in `folder` that has."""
    if importlib.util.find_spec("pip") is not None:
        return Path(sys.executable)
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def has_setuptools() -> bool:
    """Whether this Python has a setuptools that can build the project."""
    if importlib.util.find_spec("pip") is None:
        return False
    try:
        return int(metadata.version("setuptools").split(".")[0]) >= OLDEST_SETUPTOOLS
    except metadata.PackageNotFoundError:
        return False


def main() -> None:
    """Builds into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(build_wheel(parser.parse_args().folder))


if __name__ == "__main__":
    main()
