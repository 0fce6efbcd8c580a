"""Real releases of other projects for tests: the Python files of their wheels, downloaded once per machine."""

import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.integration.programs import run

CACHE = Path.home() / ".cache" / "ep_a2a"
GLIBC_VERSIONS = (39, 35, 34, 31, 28, 24, 17)
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in GLIBC_VERSIONS), "manylinux2014", "manylinux1")
DOWNLOAD_TIMEOUT_SECS = 900


class Unavailable(Exception):
    """What a test needs cannot be had here; the text says why."""


@dataclass(frozen=True)
class Release:
    """One version of a package.

    Attributes:
        package, version: as pip takes them; version "": the newest.
        below: folders of the wheel that are kept; () = all.
        suffixes: ends of the names of files that are kept.
        python: the Python whose wheel is taken. abis: its ABI tags. Neither is this process's: only files are read.
    """

    package: str
    version: str
    below: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = (".py",)
    python: str = "3.12"
    abis: tuple[str, ...] = ("cp312", "abi3", "none")

    def folder(self) -> Path:
        """The folder with the wheel's files and METADATA; downloaded once.

        Raises:
            Unavailable: pip cannot download it.
        """
        version = "".join([self.version, *self.suffixes[1:]])
        folder = CACHE / self.package / version
        name = self.package.replace("-", "_")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # several workers may want it at once
        with folder.with_name(f"{version}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / f"{name}-{self.version}.dist-info" / "METADATA").exists():
                with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
                    unpacked = Path(temporary) / "unpacked"
                    _unpack(self.download(Path(temporary)), unpacked, self.below, self.suffixes)
                    shutil.rmtree(folder, ignore_errors=True)
                    unpacked.rename(folder)
        return folder

    def download(self, folder: Path) -> Path:
        """The wheel, whatever machine this is: nothing compiled in it is used."""
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", self.python, "--implementation", "cp"]
        command += [part for abi in self.abis for part in ("--abi", abi)]
        command += [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
        what = f"{self.package}=={self.version}" if self.version else self.package
        try:
            done = run(*command, "--dest", folder, what, secs=DOWNLOAD_TIMEOUT_SECS)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"the download of {what} took more than {DOWNLOAD_TIMEOUT_SECS} s") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise Unavailable(f"pip cannot download {what}: {said[-1]}")
        return next(folder.glob("*.whl"))


def newest(release: Release, folder: Path) -> str:
    """Unpacks the newest release of a package into a folder; returns its version.

    Raises:
        Unavailable: pip cannot download it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        wheel = release.download(Path(temporary))
        _unpack(wheel, folder, release.below, release.suffixes)
    return wheel.name.split("-")[1]


def _unpack(wheel: Path, folder: Path, below: tuple[str, ...], suffixes: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name
            for name in archive.namelist()
            if name.endswith(".dist-info/METADATA") or (name.endswith(suffixes) and name.startswith(below or ("",)))
        ]
        archive.extractall(folder, wanted)
