"""CI fails a test that skips for a reason that nobody has allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import allowed_skips

if TYPE_CHECKING:
    from collections.abc import Callable

PROJECT = Path(__file__).resolve().parents[2]
ALLOWED_REASON = "needs 2 GPUs, or one for all ranks, found 0"
TESTS = f"""
import pytest

@pytest.mark.skipif(True, reason="{ALLOWED_REASON}")
def test_allowed():
    pass

@pytest.mark.xfail
def test_known_to_fail():
    assert False

{{more}}
"""
SKIPS = {
    "in a test": "def test_more():\n    pytest.skip('no time')",
    "in a fixture": "@pytest.fixture\ndef it():\n    pytest.skip('no time')\n\ndef test_more(it):\n    pass",
    "by a mark": "@pytest.mark.skip(reason='no time')\ndef test_more():\n    pass",
    "of a module": "pytest.skip('no time', allow_module_level=True)",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))

    def run(more: str, *options: str) -> tuple[int, str]:
        (tmp_path / "test_it.py").write_text(TESTS.format(more=more))
        command = [sys.executable, "-m", "pytest", "-p", "tests.allowed_skips", "-p", "no:cacheprovider", *options]
        done = subprocess.run([*command, "."], capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize("more", SKIPS.values(), ids=SKIPS)
def test_another_skip_fails(run: Callable[..., tuple[int, str]], more: str) -> None:
    code, printed = run(more, allowed_skips.OPTION)
    assert code != 0
    assert "does not allow this skip on this machine, CI_WITHOUT may: no time" in printed


def test_allowed_skips_and_expected_failures_do_not(run: Callable[..., tuple[int, str]]) -> None:
    code, printed = run("", allowed_skips.OPTION)
    assert (code, "1 skipped, 1 xfailed" in printed) == (0, True), printed
    assert run(SKIPS["in a test"])[0] == 0


def test_a_whole_reason_is_compared() -> None:
    assert allowed_skips.is_allowed(ALLOWED_REASON)
    assert not allowed_skips.is_allowed(f"{ALLOWED_REASON}, and no time")
    assert not allowed_skips.is_allowed("")
