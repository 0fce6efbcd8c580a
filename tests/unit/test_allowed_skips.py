"""CI fails a test that skips for a reason that nobody has allowed."""

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


def test_other_skips_fail(tmp_path: Path) -> None:
    for name, source in {"skips": FORBIDDEN, "module": FORBIDDEN_MODULE, "allowed": ALLOWED}.items():
        (tmp_path / f"test_{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.allowed_skips", "-p", "no:cacheprovider"]
    command += [allowed_skips.OPTION, "--continue-on-collection-errors", "."]
    variables = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=variables)
    assert done.returncode == 1, done.stdout
    assert "1 failed, 1 skipped, 1 xfailed, 3 errors" in done.stdout
    assert done.stdout.count("does not allow this skip on this machine, CI_WITHOUT may: no time") >= 4


def test_a_whole_reason_is_compared() -> None:
    assert allowed_skips.is_allowed(ALLOWED_REASON)
    assert not allowed_skips.is_allowed(f"{ALLOWED_REASON}, and no time")
    assert not allowed_skips.is_allowed("")
