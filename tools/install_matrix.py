"""Installs the wheel into clean environments and runs it there: all lower bounds at once, and all newest versions.

    python tools/install_matrix.py --folder /tmp/matrix

The bounds are those of pyproject.toml. Nothing of the checkout is on the import path of what is run. Prints a table
for docs/results/verification.md; exits with 1 where something failed. A row whose Python is not on this machine is not
run, and says so. A row takes gigabytes and minutes; --keep leaves its environment. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from build_wheel import PROJECT, build_wheel

TIMEOUT_SECS = 3600
LOWEST = "lowest"
ROWS = {LOWEST: "3.11"} | {f"newest-{python}": python for python in ("3.12", "3.13", "3.14")}
"""The Python of each row."""
SHOWN = ("torch", "triton", "numpy", "filelock", "typer", "rich")
VERSIONS = f"from importlib.metadata import version; print(*map(version, {SHOWN}))"
WHERE = "import ep_a2a; print(ep_a2a.__file__)"
TESTS = (
    "tests/unit/test_config.py",
    "tests/unit/test_routing.py",
    "tests/unit/test_quantization.py",
    "tests/unit/test_layout.py",
    "tests/unit/test_cli_odd_inputs.py",
    "tests/unit/test_doctor_checks.py",
    "tests/unit/test_isolation.py",
    "tests/unit/test_triton_parts.py",
    "tests/multiprocess/test_versions.py",
    "tests/multiprocess/test_doctor_selftest.py::test_two_ranks_are_measured",
    "tests/multiprocess/test_memory.py::test_every_rank_reaches_every_region",
)
"""Fast ones that cover each layer; the interpreted op is compared with what it must return."""


class StepFailedError(Exception):
    """A command ended with an error; the text is the end of what it printed."""


def lower_bounds() -> list[str]:
    """Return what is needed at run time and by tests, each at its lower bound, as lines of a constraints file."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return [text.replace(">=", "==") for text in project["dependencies"] + project["optional-dependencies"]["test"]]


def find_python(version: str) -> str | None:
    """Return an interpreter of this minor version: on the path, or one of pyenv's."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
        return found
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return str(installed[-1]) if installed else None


def run(*command: str | Path, cwd: Path) -> str:
    """Return what a command prints, run where nothing of the checkout can be imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EP_A2A_", "PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECS,
        check=False,
    )
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        raise StepFailedError(f"exit code {done.returncode} of {shown}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


class Row:
    """One environment, in a folder of its own.

    Attributes:
        versions: Python's and those of SHOWN, once they are installed.
        steps: "ok" or what failed, by step.
    """

    def __init__(self, name: str, wheel: Path, folder: Path) -> None:
        self.name, self.wheel, self.folder = name, wheel, folder / name
        self.versions = [ROWS[name]]
        self.interpreter = find_python(ROWS[name])
        self.steps: dict[str, str] = {}
        self._binaries = self.folder / "venv" / "bin"

    @property
    def works(self) -> bool:
        """Whether no step failed."""
        return not any(text.startswith("FAILED") for text in self.steps.values())

    def try_steps(self) -> None:
        """Run the steps in order, up to the first that fails."""
        if self.interpreter is None:
            self.steps["install"] = f"not run: there is no Python {ROWS[self.name]} here"
            return
        for step in (self.install, self.doctor, self.demo, self.tests):
            started, name = time.monotonic(), step.__name__
            try:
                self.steps[name] = f"ok{step()}"
            except (StepFailedError, subprocess.TimeoutExpired) as error:
                self.steps[name] = f"FAILED: {error}"
                return
            finally:
                print(f"{self.name}: {name}: {time.monotonic() - started:.0f} s", file=sys.stderr)

    def install(self) -> str:
        """Install the wheel and what tests need, at the versions of the row."""
        shutil.copytree(PROJECT / "tests", self.folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(lower_bounds()) if self.name == LOWEST else "")
        run(self.interpreter, "-m", "venv", self.folder / "venv", cwd=self.folder)
        pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        cache = self.folder.parent / "pip"  # of all rows
        self._python(*pip, "--cache-dir", cache, "--constraint", constraints, f"{self.wheel}[test]")
        self.versions += self._python("-c", VERSIONS).split()
        place = self._python("-c", WHERE).strip()
        if not Path(place).is_relative_to(self.folder / "venv"):
            raise StepFailedError(f"ep_a2a came from {place}")
        return ""

    def doctor(self) -> str:
        """Run `ep-a2a doctor`, which reads the metadata of the wheel."""
        machine = json.loads(self._program("doctor", "--json"))["machine"]
        if machine["installed_version"] != machine["version"] or not machine["vllm_entry_point"]:
            raise StepFailedError(f"the metadata are not those of the wheel: {machine}")
        return ""

    def demo(self) -> str:
        """Run `ep-a2a demo` on two CPU ranks."""
        if not json.loads(self._program("demo", "--json", "--ranks", "2", "--device", "cpu"))["matches"]:
            raise StepFailedError("the demo's result is not that of the dense layer")
        return ""

    def tests(self) -> str:
        """Run TESTS without pyproject.toml, so without its configuration of pytest."""
        options = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning")
        printed = self._python("-P", "-m", "pytest", *options, *TESTS)
        return " " + re.sub(r" in .*", "", printed.strip().splitlines()[-1])

    def _python(self, *arguments: str | Path) -> str:
        return run(self._binaries / "python", *arguments, cwd=self.folder)

    def _program(self, *arguments: str) -> str:
        return run(self._binaries / "ep-a2a", *arguments, cwd=self.folder)


def table(rows: list[Row]) -> str:
    """Return the rows as markdown."""
    steps = ("install", "doctor", "demo", "tests")
    titles = ("", "Python", *SHOWN, *steps)
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        versions = [*row.versions, *[""] * len(SHOWN)][: len(SHOWN) + 1]
        cells = [row.steps.get(step, "").partition("\n")[0] for step in steps]
        lines.append(f"| {' | '.join([row.name, *versions, *cells])} |")
    return "\n".join(lines)


def try_rows(names: list[str], wheel: Path, folder: Path, *, keep: bool = False) -> bool:
    """Try the wheel in each row's environment, print the table and all failures; return whether all rows work."""
    rows = [Row(name, wheel.resolve(), folder.resolve()) for name in names]
    for row in rows:
        row.folder.mkdir(parents=True)
        row.try_steps()
        if not keep:
            shutil.rmtree(row.folder)
    print(table(rows))
    for row in rows:
        for step, text in row.steps.items():
            if text.startswith("FAILED"):
                print(f"\n{row.name}, {step}: {text}")
    return all(row.works for row in rows)


def main() -> None:
    """Build the wheel and try the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where environments are made; needs 15 GB")
    parser.add_argument("--only", choices=ROWS, help="the one row to try")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    options = parser.parse_args()
    wheel = build_wheel(options.folder / "dist")
    names = [options.only] if options.only else list(ROWS)
    sys.exit(not try_rows(names, wheel, options.folder, keep=options.keep))


if __name__ == "__main__":
    main()
