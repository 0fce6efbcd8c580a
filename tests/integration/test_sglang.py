"""The SGLang integration against real releases: their sources, and the modules of the newest one on two CPU ranks.

The checks are functions of tests/engines/sglang/program.py. They run in a process of their own, where vLLM's
dependencies, which SGLang's modules share, are installed; stand_ins.py takes the place of the others.
"""

from functools import cache
from pathlib import Path

import pytest

from ep_a2a.integrations import contract
from ep_a2a.integrations.sglang import plugin
from tests.engines.sglang.program import CHECKS
from tests.engines.vllm.contract.reports import TIMEOUT, run_checks
from tests.engines.vllm.contract.wheels import Unavailable, python_with_dependencies
from tests.wheels import Release

VERSIONS = (plugin.OLDEST, "0.5.20", plugin.NEWEST)

pytestmark = TIMEOUT


@cache
def folder_of(version: str) -> Path:
    """The folder with `sglang`; its kernels' C++ sources are there, because SGLang's modules look for the folder."""
    suffixes = (".py", ".cuh", ".h")
    try:
        return Release("sglang", version, ("sglang/",), suffixes, "3.11", ("cp311", "none")).folder()
    except Unavailable as problem:
        pytest.skip(str(problem))


@cache
def reports() -> dict[str, str | None]:
    try:
        python = python_with_dependencies()
    except Unavailable as problem:
        pytest.skip(str(problem))
    return run_checks(python, folder_of(plugin.NEWEST), tuple(CHECKS), "tests.engines.sglang.program")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_has_the_names_that_are_used(version):
    assert contract.differences(folder_of(version) / "sglang", plugin.CONTRACT) == []


@pytest.mark.parametrize("check", CHECKS)
def test_checks(check):
    assert check in reports(), reports()[""]
    assert reports()[check] is None, reports()[check]
