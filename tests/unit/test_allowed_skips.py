"""CI fails a test that skips for a reason that nobody has allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import allowed_skips

PROJECT = Path(__file__).resolve().parents[2]
ALLOWED_REASON = "needs 2 GPUs, or one for all ranks, found 0"
ALLOWED = f"""
import pytest

@pytest.mark.skipif(True, reason="{ALLOWED_REASON}")
def test_allowed():
    pass

@pytest.mark.xfail
def test_known_to_fail():
    assert False
"""
FORBIDDEN = """
import pytest

@pytest.fixture
def it():
    pytest.skip("no time")

def test_with_fixture(it):
    pass

def test_itself():
    pytest.skip("no time")

@pytest.mark.skip(reason="no time")
def test_marked():
    pass
"""
FORBIDDEN_MODULE = "import pytest\npytest.skip('no time', allow_module_level=True)"


def run(folder: Path, *options: str, **sources: str) -> tuple[int, str]:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.allowed_skips", "-p", "no:cacheprovider", *options, "."]
    variables = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=variables)
    return done.returncode, done.stdout


def test_other_skips_fail(tmp_path: Path) -> None:
    sources = {"test_skips": FORBIDDEN, "test_module": FORBIDDEN_MODULE}
    code, printed = run(tmp_path, allowed_skips.OPTION, "--continue-on-collection-errors", **sources)
    assert (code, "1 failed, 3 errors" in printed) == (1, True), printed
    assert printed.count("does not allow this skip on this machine, CI_WITHOUT may: no time") >= 4


def test_allowed_skips_and_expected_failures_do_not(tmp_path: Path) -> None:
    code, printed = run(tmp_path, allowed_skips.OPTION, test_it=ALLOWED)
    assert (code, "1 skipped, 1 xfailed" in printed) == (0, True), printed


def test_a_whole_reason_is_compared() -> None:
    assert allowed_skips.is_allowed(ALLOWED_REASON)
    assert not allowed_skips.is_allowed(f"{ALLOWED_REASON}, and no time")
    assert not allowed_skips.is_allowed("")
