"""What became of a check that a program has run in a real vLLM."""

from __future__ import annotations

from functools import cache

import pytest

from tests.engines.vllm.contract.wheels import Unavailable, run_program


@cache
def _reports_of(program: str, version: str, checks: tuple[str, ...]) -> dict[str, str | None] | Unavailable:
    try:
        return run_program(version, program, *checks)
    except Unavailable as problem:
        return problem


def require_passed(program: str, version: str, checks: tuple[str, ...], check: str) -> None:
    """Fails with the traceback of `check`, which is one of `checks`; the first call runs them all in one process."""
    reports = _reports_of(program, version, checks)
    if isinstance(reports, Unavailable):
        pytest.skip(str(reports))
    assert check in reports, reports[""]
    assert reports[check] is None, reports[check]
