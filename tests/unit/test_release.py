"""`make release`: what keeps it from starting. The release itself takes minutes and a package index."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def commit(folder: Path) -> None:
    for command in (["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """tools/release.py on a small repository with a version and a changelog."""
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.reload(importlib.import_module("release"))
    (tmp_path / "ep_a2a").mkdir()
    (tmp_path / "ep_a2a" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [1.2.3] - unreleased\n")
    monkeypatch.setattr(module, "PROJECT", tmp_path)
    module.run.__kwdefaults__ = {"cwd": tmp_path}
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path)
    return module


def test_a_clean_tree_says_its_version(release):
    assert release.check_tree() == "1.2.3"


def test_nothing_is_written_where_the_tree_has_changes(release, tmp_path, monkeypatch, capsys):
    (release.PROJECT / "left").write_text("over")
    monkeypatch.setattr(sys, "argv", ["release.py", str(tmp_path / "dist")])
    with pytest.raises(SystemExit) as caught:
        release.main()
    assert caught.value.code == 2
    assert "no release: the tree has changes; commit or remove them:\n?? left" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


def test_a_version_without_a_heading_is_refused(release):
    (release.PROJECT / "CHANGELOG.md").write_text("## [1.2.2] - unreleased\n")
    commit(release.PROJECT)
    with pytest.raises(release.ReleaseError, match=r"no heading \[1\.2\.3\]"):
        release.check_tree()
