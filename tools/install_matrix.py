"""Installs the wheel into clean environments with the lowest and highest torch, Triton and Python, and runs it there.

    python tools/install_matrix.py --folder /tmp/matrix

Nothing of the checkout is on the import path of what is run. Prints a table for docs/results/verification.md; exits
with 1 where something failed. A combination takes gigabytes and minutes; environments are removed one by one unless
--keep is given. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from build_wheel import PROJECT, build_wheel

TIMEOUT_SECS = 3600
TEST_PACKAGES = ("pytest>=8", "hypothesis>=6.100", "matplotlib>=3.8")
TESTS = (
    "tests/unit/test_config.py",
    "tests/unit/test_routing.py",
    "tests/unit/test_quantization.py",
    "tests/unit/test_layout.py",
    "tests/unit/test_doctor_checks.py",
    "tests/unit/test_isolation.py",
    "tests/multiprocess/test_versions.py",
    "tests/multiprocess/test_doctor_selftest.py::test_two_ranks_are_measured",
    "tests/multiprocess/test_memory.py::test_every_rank_reaches_every_region",
)
"""Fast ones that cover each layer; the interpreted op is compared with what it must return."""
VERSIONS = "import platform, torch, triton; print(platform.python_version(), torch.__version__, triton.__version__)"
WHERE = "import ep_a2a; print(ep_a2a.__file__)"


@dataclass(frozen=True)
class Combination:
    """What is installed beside the wheel: a Python, and requirements that pin torch and Triton."""

    name: str
    python: str
    requirements: tuple[str, ...]


COMBINATIONS = (
    Combination("lowest", "3.11", ("torch==2.11.0", "triton==3.6.0")),
    Combination("between", "3.12", ("torch==2.13.0",)),
    Combination("highest", "3.13", ("torch==2.15.0", "triton==3.9.0")),
)


@dataclass
class Outcome:
    """What came of a combination: versions that were installed, and "ok" or what failed, by step."""

    name: str
    versions: str = ""
    steps: dict[str, str] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether every step was ok."""
        return all(text.startswith("ok") for text in self.steps.values())


class StepFailedError(Exception):
    """A step of a combination ended with an error; the text is the end of what it printed."""


def find_python(version: str) -> str | None:
    """An interpreter of this minor version: on the path, or one of pyenv's."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
        return found
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    return str(installed[-1]) if installed else None


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, run where nothing of the checkout can be imported."""
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
        raise StepFailedError(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def try_combination(combination: Combination, wheel: Path, folder: Path, *, keep: bool) -> Outcome:
    """Makes the environment and runs everything in it; stops at the first step that fails."""
    outcome = Outcome(combination.name)
    interpreter = find_python(combination.python)
    if interpreter is None:
        outcome.steps["python"] = f"not run: there is no Python {combination.python} here"
        return outcome
    environment, work = folder / f"venv-{combination.python}", folder / f"work-{combination.python}"
    work.mkdir(parents=True)
    binaries = environment / "bin"
    pip = (binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
    shutil.copytree(PROJECT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__"))

    def install() -> str:
        run(interpreter, "-m", "venv", environment, cwd=work)
        run(*pip, *combination.requirements, wheel, cwd=work)
        outcome.versions = run(binaries / "python", "-c", VERSIONS, cwd=work).strip()
        place = run(binaries / "python", "-c", WHERE, cwd=work).strip()
        if not Path(place).is_relative_to(environment):
            raise StepFailedError(f"ep_a2a came from {place}")
        return ""

    def see_doctor() -> str:
        report = json.loads(run(binaries / "ep-a2a", "doctor", "--json", cwd=work))
        installation = report["machine"]["installation"]
        if installation["installed_version"] != installation["version"] or not installation["vllm_entry_point"]:
            raise StepFailedError(f"the metadata are not those of the wheel: {installation}")
        return ""

    def demo() -> str:
        report = json.loads(run(binaries / "ep-a2a", "demo", "--json", "--ranks", "2", "--device", "cpu", cwd=work))
        if not report["matches"]:
            raise StepFailedError("the demo's result is not that of the dense layer")
        return ""

    def test() -> str:
        run(*pip, *TEST_PACKAGES, cwd=work)
        # Without pyproject.toml there is no configuration of pytest: tests of a wheel need none.
        options = ("-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestUnknownMarkWarning")
        return " " + run(binaries / "python", "-P", "-m", "pytest", *options, *TESTS, cwd=work).strip().splitlines()[-1]

    try:
        for name, step in (("install", install), ("doctor", see_doctor), ("demo", demo), ("tests", test)):
            started = time.monotonic()
            try:
                outcome.steps[name] = f"ok{step()}"
            except (StepFailedError, subprocess.TimeoutExpired) as error:
                outcome.steps[name] = f"FAILED: {error}"
                break
            finally:
                print(f"{combination.name}: {name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    finally:
        if not keep:
            shutil.rmtree(environment, ignore_errors=True)
            shutil.rmtree(work, ignore_errors=True)
    return outcome


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as markdown."""
    lines = ["| | Python | torch | Triton | install | doctor | demo | tests |", f"|{'---|' * 8}"]
    for outcome in outcomes:
        cells = [outcome.steps.get(step, "").partition("\n")[0] for step in ("install", "doctor", "demo", "tests")]
        versions = outcome.versions.split() or [outcome.steps.get("python", ""), "", ""]
        lines.append(f"| {' | '.join([outcome.name, *versions, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the combinations and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where environments are made; needs 15 GB")
    parser.add_argument("--only", help="name of the one combination to run")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    options = parser.parse_args()
    wheel = build_wheel(options.folder / "dist").resolve()
    chosen = [each for each in COMBINATIONS if options.only in (None, each.name)]
    outcomes = [try_combination(each, wheel, options.folder.resolve(), keep=options.keep) for each in chosen]
    print(table(outcomes))
    for outcome in outcomes:
        for step, text in outcome.steps.items():
            if not text.startswith("ok"):
                print(f"\n{outcome.name}, {step}: {text}")
    sys.exit(not all(outcome.works for outcome in outcomes))


if __name__ == "__main__":
    main()
