"""MoE layers of a real vLLM on two CPU ranks, with our prepare/finalize, against the dense layer in float32.

The checks are functions of tests/vllm_contract/layer_checks.py. One process with a pool of ranks runs them all; each
test asks what became of one check.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.vllm_contract.layer_checks import LAYER_CHECKS
from tests.vllm_contract.wheels import (
    DOWNLOAD_TIMEOUT_SECS,
    NEWEST,
    PROGRAM_TIMEOUT_SECS,
    VERSIONS,
    Unavailable,
    run_program,
)

IN_EVERY_VERSION = "fp8_per_block"

pytestmark = pytest.mark.timeout(DOWNLOAD_TIMEOUT_SECS + PROGRAM_TIMEOUT_SECS)


@cache
def reports_of(version: str, checks: tuple[str, ...]) -> dict[str, str | None] | Unavailable:
    try:
        return run_program(version, "tests.vllm_contract.layer_program", *checks)
    except Unavailable as problem:
        return problem


def passes(version: str, checks: tuple[str, ...], check: str) -> None:
    reports = reports_of(version, checks)
    if isinstance(reports, Unavailable):
        pytest.skip(str(reports))
    assert check in reports, reports[""]
    assert reports[check] is None, reports[check]


@pytest.mark.parametrize("check", LAYER_CHECKS)
def test_layers(check):
    passes(NEWEST, tuple(LAYER_CHECKS), check)


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_a_layer_of_older_versions(version):
    passes(version, (IN_EVERY_VERSION,), IN_EVERY_VERSION)
