"""Runs the tests on mutants: copies of this checkout with one fault each, which a named test must notice.

    python tools/mutants.py                    # all of tools/mutants.toml
    python tools/mutants.py --only NAME        # one of them; may be repeated
    python tools/mutants.py --match cast       # those whose name contains a text
    python tools/mutants.py --list             # names, files and tests
    python tools/mutants.py --jobs 1           # one after another; by default one for each core

A mutant is a table of tools/mutants.toml: name, file, old, new, test. `old` occurs once in the file and becomes `new`;
`test` is the pytest id of a test that passes here and must fail there. The script first runs all these tests without
an edit. It prints one line per mutant and exits with 1 when a mutant survives, which means that a test is missing, or
that the code is needless.
"""

from __future__ import annotations

import argparse
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
TABLE = PROJECT / "tools" / "mutants.toml"
TEST_SECS = 120
"""Bound of one test; a test that a mutant makes hang has failed then."""
RUN_SECS = 1800
"""Bound of one run of pytest."""
KILLED, SURVIVED, NO_VERDICT = "killed", "SURVIVED", "NO VERDICT"


class EditError(ValueError):
    """An edit that does not fit the source."""


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: unique. file: below the checkout. old, new: text. test: pytest id of the test that must fail.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    def edit(self, source: str) -> str:
        """The source with the fault.

        Raises:
            EditError: the old text does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise EditError(f"{self.name}: expected the old text once in {self.file}, found it {count} times")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """What has become of a mutant; output: of pytest, if it was not killed."""

    name: str
    verdict: str
    secs: float
    output: str = ""


def read_table(path: Path = TABLE) -> list[Mutant]:
    """All mutants."""
    return [Mutant(**each) for each in tomllib.loads(path.read_text())["mutant"]]


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore, as they are in the checkout now."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in names:
        source, target = PROJECT / name, folder / name
        if name and source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def run_tests(folder: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy, with its package and without leaving compiled Python files."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
    return subprocess.run(
        [*command, "-o", f"timeout={TEST_SECS}", *tests],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECS,
    )


def try_mutant(folder: Path, mutant: Mutant) -> Result:
    """Run a mutant's test in a copy, which is restored behind it."""
    path, start = folder / mutant.file, time.monotonic()
    source = path.read_text()
    path.write_text(mutant.edit(source))
    try:
        run = run_tests(folder, [mutant.test])
        status, output = run.returncode, run.stdout
    except subprocess.TimeoutExpired as error:
        status, output = None, str(error)
    finally:
        path.write_text(source)
    secs = time.monotonic() - start
    # pytest exits with 1 where tests ran and failed, or a fixture did; other codes say that no test ran
    if status == 1 and "\nFAILED " in output:
        return Result(mutant.name, KILLED, secs)
    return Result(mutant.name, SURVIVED if status == 0 else NO_VERDICT, secs, output)


def try_all(mutants: list[Mutant], num_jobs: int) -> list[Result]:
    """Try mutants in copies of the checkout, and print a line for each."""
    results = []
    with tempfile.TemporaryDirectory(prefix="ep_a2a_mutants_") as parent:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(min(num_jobs, len(mutants))):
            folders.put(Path(parent, str(number)))
            copy_checkout(Path(parent, str(number)))
        whole = run_tests(Path(parent, "0"), sorted({each.test for each in mutants}))
        if whole.returncode:
            raise SystemExit(f"{whole.stdout}\nthese tests must pass before an edit")

        def try_one(mutant: Mutant) -> Result:
            folder = folders.get()
            try:
                return try_mutant(folder, mutant)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(num_jobs) as pool:
            for done in as_completed([pool.submit(try_one, each) for each in mutants]):
                results.append(result := done.result())
                print(f"{result.verdict:10} {result.secs:6.1f} s  {result.name}", flush=True)
    return results


def main() -> int:
    """Tries the chosen mutants; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="only this mutant; may be repeated")
    parser.add_argument("--match", default="", metavar="TEXT", help="only mutants whose name contains this")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at the same time")
    options = parser.parse_args()
    table = read_table()
    unknown = set(options.only or ()) - {each.name for each in table}
    mutants = [each for each in table if each.name in (options.only or [each.name]) and options.match in each.name]
    if unknown or not mutants:
        parser.error(f"no such mutant: {', '.join(sorted(unknown)) or options.match}; --list prints all")
    if options.list:
        for each in mutants:
            print(f"{each.name}\n    {each.file}\n    {each.test}")
        return 0
    start = time.monotonic()
    results = try_all(mutants, options.jobs)
    left = [each for each in results if each.verdict != KILLED]
    for each in left:
        print(f"\n{each.verdict}: {each.name}\n{each.output}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_secs = used.ru_utime + used.ru_stime
    print(
        f"{len(results) - len(left)} of {len(results)} killed in {time.monotonic() - start:.0f} s, {cpu_secs:.0f} CPU s"
    )
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
