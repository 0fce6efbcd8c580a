"""The table of what `make test` runs names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tiers import QUICK, is_quick, parse_share

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


def test_shares():
    assert parse_share("1/1") == (1, 1)
    assert parse_share("3/4") == (3, 4)
    for wrong in ("", "3", "0/4", "5/4", "a/b", "1/4/2", "-1/4"):
        with pytest.raises(ValueError, match="1 <= K <= N"):
            parse_share(wrong)
