"""Programs for developers answer --help at once."""

from __future__ import annotations

import pytest

from tests.integration.programs import run_python, succeeded


@pytest.mark.parametrize("program", [("tools/check_commit_message.py",), ("tools/vllm_signatures.py",)])
def test_help_is_printed(program: tuple[str, ...]) -> None:
    assert "usage: " in succeeded(run_python(*program, "--help"))
