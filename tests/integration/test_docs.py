"""What the documents say exists: linked files, make targets, the README's commands."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(PROJECT)) for p in (PROJECT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = PROJECT / name
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    assert not [link for link in links if "://" not in link and not (document.parent / link).exists()]


def test_readme_commands_are_make_targets() -> None:
    targets = set(re.findall(r"^(\w+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint"} <= targets
    assert set(re.findall(r"^make (\w+)", (PROJECT / "README.md").read_text(), re.MULTILINE)) == {"demo", "test"}
