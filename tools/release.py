"""Builds sdist and wheel from the last commit, checks them, and tries the wheel as install_matrix.py does.

What the backends call of other projects' libraries is compared with the newest release of each first.

    python tools/release.py dist

Nothing is written to the folder before every check has passed. Standard library only; `build` and `twine` are
installed into an environment of their own.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

from build_wheel import long_description
from install import CONSTRAINTS
from install_matrix import ROWS, StepFailedError, run, try_rows

PROJECT = Path(__file__).resolve().parent.parent
TOOLS = ("build", "twine")
EXIT_ERROR = 2


class ReleaseError(StepFailedError):
    """The release cannot be made; the text says what is wrong and what to do."""


def check_tree() -> str:
    """The version to be released, of a tree without changes, with a heading in the changelog."""
    if changed := run("git", "status", "--porcelain", cwd=PROJECT):
        raise ReleaseError(f"the tree has changes; commit or remove them:\n{changed}")
    found = re.search(r'^__version__ = "(.+)"$', (PROJECT / "ep_a2a" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise ReleaseError('ep_a2a/__init__.py has no line __version__ = "..."')
    if f"## [{found[1]}]" not in (PROJECT / "CHANGELOG.md").read_text():
        raise ReleaseError(f"CHANGELOG.md has no heading [{found[1]}]; write one")
    return found[1]


def build(work: Path) -> list[Path]:
    """The sdist, built from the files of the last commit, and the wheel, built from the sdist."""
    environment, tree, built = work / "tools", work / "tree", work / "dist"
    venv.create(environment, with_pip=True)
    run(
        environment / "bin" / "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--constraint",
        CONSTRAINTS,
        *TOOLS,
        cwd=work,
    )
    archive = work / "tree.tar"
    run("git", "archive", "--output", archive, "HEAD", cwd=PROJECT)
    with tarfile.open(archive) as files:
        files.extractall(tree, filter="data")
    (tree / "README.md").write_text(long_description())
    run(environment / "bin" / "python", "-m", "build", "--outdir", built, tree, cwd=work)
    files = sorted(built.iterdir())
    run(environment / "bin" / "twine", "check", "--strict", *files, cwd=work)
    return files


def check_contents(wheel: Path) -> None:
    """Raises unless the wheel has every module and every config of the last commit."""
    listed = run("git", "ls-files", "ep_a2a", "configs", cwd=PROJECT).splitlines()
    wanted = {name if name.startswith("ep_a2a/") else f"ep_a2a/{name}" for name in listed}
    with zipfile.ZipFile(wheel) as archive:
        missing = wanted - set(archive.namelist())
    if missing:
        raise ReleaseError(f"the wheel lacks {', '.join(sorted(missing))}; see pyproject.toml, [tool.setuptools]")


def check_peers() -> None:
    """Raises where the managers call what the newest release of a library does not have."""
    sys.path.insert(0, str(PROJECT))
    from tests.peer_contract.compare import newest_problems

    misfits, missing = newest_problems()
    for line in missing:
        print(f"not compared with the newest release: {line}", file=sys.stderr)
    if misfits:
        text = "\n".join(misfits)
        raise ReleaseError(f"managers/external calls what newest releases do not have; mend it or pinned.toml:\n{text}")


def main() -> None:
    """Makes the release into the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    try:
        version = check_tree()
        check_peers()
        with tempfile.TemporaryDirectory(prefix="ep_a2a_release_") as name:
            files = build(Path(name))
            wheel = next(path for path in files if path.suffix == ".whl")
            check_contents(wheel)
            if not try_rows(list(ROWS), wheel, Path(name) / "matrix"):
                raise ReleaseError("the wheel does not work everywhere; the table says where")
            options.folder.mkdir(parents=True, exist_ok=True)
            for path in files:
                print(shutil.copy(path, options.folder))
    except StepFailedError as error:
        print(f"no release: {error}", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    print(f"ep_a2a {version}: built, checked and tried in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
