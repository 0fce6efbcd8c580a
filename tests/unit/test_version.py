"""The version stands in ep_a2a/__init__.py alone, and the changelog has a section for it."""

import re
from pathlib import Path

import ep_a2a

PROJECT = Path(__file__).parents[2]
READ = (
    "*.md",
    "*.toml",
    "*.cfg",
    "Makefile",
    "docs/**/*.md",
    "docs/**/*.py",
    "ep_a2a/**/*.py",
    "tools/**/*.py",
    "examples/**/*.py",
    ".github/**/*.yml",
)
PLACES = {"ep_a2a/__init__.py", "CHANGELOG.md"}


def test_the_version_stands_in_one_place() -> None:
    files = {path for pattern in READ for path in PROJECT.glob(pattern) if "results" not in path.parts}
    of_this = re.compile(rf"(?<![\d.]){re.escape(ep_a2a.__version__)}(?![\d.])")
    found = {str(path.relative_to(PROJECT)) for path in files if of_this.search(path.read_text(encoding="utf-8"))}
    assert found == PLACES
