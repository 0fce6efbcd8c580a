"""The table of what `make test` runs names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tiers import QUICK, is_quick

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("entry", QUICK)
def test_what_is_named_exists(entry):
    path, _, function = entry.partition("::")
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not function or function in names


def test_folders_files_and_functions():
    assert is_quick("unit/test_anything.py", "test_new")
    assert is_quick("multiprocess/test_covering.py", "test_new")
    assert is_quick("multiprocess/test_backend_parity.py", "test_parity")
    assert not is_quick("multiprocess/test_backend_parity.py", "test_new")
    assert not is_quick("integration/test_docs.py", "test_new")
