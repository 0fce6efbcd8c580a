"""The vLLM integration against real releases: their sources, and their modules where vLLM's dependencies are installed.

The checks are functions of tests/engines/vllm/contract/*_checks.py. They run in processes of their own, which import a
release's Python files; each test asks what became of one check.
"""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from ep_a2a.commands.plan.families import table
from ep_a2a.integrations import contract
from ep_a2a.integrations.vllm.support import CONTRACT
from tests.engines.vllm.contract.patch_registry import PATCHES
from tests.engines.vllm.contract.program import CHECKS
from tests.engines.vllm.contract.reports import TIMEOUT, require_passed
from tests.engines.vllm.contract.wheels import VERSIONS, Unavailable, metadata_path, symbol_of, wheel_folder
from tools.moe_families import KEYS, families_of, text_of

TORCH_VERSIONS = ("2.11", "2.12", "2.13", "2.14")

pytestmark = [TIMEOUT, pytest.mark.parametrize("version", VERSIONS)]


@cache
def folder_of(version: str) -> Path | Unavailable:
    try:
        return wheel_folder(version)
    except Unavailable as problem:
        return problem


@pytest.fixture
def wheel(version: str) -> Path:
    """The folder of a release."""
    found = folder_of(version)
    if isinstance(found, Unavailable):
        pytest.skip(str(found))
    return found


def test_it_has_the_names_that_are_used(wheel):
    assert contract.differences(wheel / "vllm", CONTRACT) == []


def test_its_torch_is_one_of_ours(wheel, version):
    metadata = metadata_path(wheel, version).read_text()
    (pinned,) = re.findall(r"^Requires-Dist: torch==(\d+\.\d+)", metadata, re.MULTILINE)
    assert pinned in TORCH_VERSIONS


def test_its_model_files_size_models_as_the_table_says(wheel, version):
    known, found = table(), families_of(wheel / "vllm")
    if version == known.release:
        # else write it again by tools/moe_families.py
        assert {name: family for family, names in found.items() for name in names} == known.architectures
        assert tomllib.loads(text_of(found, version, known.date))["usual"] == {
            name: list(getattr(known.usual, name)) for name in KEYS
        }


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_target_of_every_patch_is_there(wheel, patch):
    path, _, name = symbol_of(patch.target).partition(":")
    assert contract.find(wheel / "vllm" / path, name) is not None


@pytest.mark.parametrize("check", CHECKS)
def test_checks(version, check):
    require_passed(version, tuple(CHECKS), check)
