"""`make release`: what keeps it from starting. The release itself takes minutes and a package index."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """tools/release.py on a small repository with a version and a changelog."""
    monkeypatch.syspath_prepend(str(TOOLS))
    spec = importlib.util.spec_from_file_location("release", TOOLS / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "ep_a2a").mkdir()
    (tmp_path / "ep_a2a" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [1.2.3] - unreleased\n")
    monkeypatch.setattr(module, "PROJECT", tmp_path)
    module.run.__kwdefaults__ = {"cwd": tmp_path}
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return module


def test_a_clean_tree_says_its_version(release):
    assert release.check_tree() == "1.2.3"


def test_a_changed_tree_is_refused(release):
    (release.PROJECT / "left").write_text("over")
    with pytest.raises(release.ReleaseError, match=r"changes; commit or remove them:\n\?\? left"):
        release.check_tree()


def test_a_version_without_a_heading_is_refused(release):
    (release.PROJECT / "ep_a2a" / "__init__.py").write_text('__version__ = "1.2.4"\n')
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "y"], cwd=release.PROJECT, check=True
    )
    with pytest.raises(release.ReleaseError, match=r"no heading \[1\.2\.4\]"):
        release.check_tree()


def test_nothing_is_written_when_it_is_refused(release, tmp_path, monkeypatch, capsys):
    (release.PROJECT / "left").write_text("over")
    monkeypatch.setattr(sys, "argv", ["release.py", str(tmp_path / "dist")])
    with pytest.raises(SystemExit) as caught:
        release.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("no release: the tree has changes")
    assert not (tmp_path / "dist").exists()
