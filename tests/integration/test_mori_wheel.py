"""The pinned facts of MORI (tests/signatures/mori.json) against its wheel, which is parsed and not imported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.signatures.reader import load, read_mori

CACHE = Path.home() / ".cache" / "ep_a2a" / "mori"
PLATFORM = ("--python-version", "3.12", "--platform", "manylinux_2_39_x86_64")
"""One that the release has a wheel for, whatever machine this is: nothing compiled in it is used."""
DOWNLOAD_TIMEOUT_SECS = 120


def unpacked_wheel(version: str) -> Path:
    """The folder of a release's Python files and headers; downloaded once. Skips the test where pip cannot."""
    folder = CACHE / version
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                *PLATFORM,
            ]
            try:
                done = subprocess.run(
                    [*command, "--dest", temporary, f"amd-mori=={version}"],
                    capture_output=True,
                    text=True,
                    timeout=DOWNLOAD_TIMEOUT_SECS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                pytest.skip(f"the download of amd-mori {version} took more than {DOWNLOAD_TIMEOUT_SECS} s")
            if done.returncode:
                pytest.skip(f"pip cannot download amd-mori {version}: {done.stderr.strip().splitlines()[-1:]}")
            with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as archive:
                wanted = [name for name in archive.namelist() if name.endswith((".py", ".hpp"))]
                archive.extractall(Path(temporary) / "unpacked", wanted)
            (Path(temporary) / "unpacked").rename(folder)
    return folder


def test_the_wheel_is_as_pinned() -> None:
    pinned = load("mori")
    found = read_mori(unpacked_wheel(pinned["version"]))
    assert found["modules"] == pinned["modules"]
    assert found["enums"] == pinned["enums"]
