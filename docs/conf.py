"""Sphinx configuration of the documentation; `make docs` builds it with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

PROJECT_FOLDER = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT_FOLDER), str(PROJECT_FOLDER / "docs" / "_ext")]

import ep_a2a  # noqa: E402

project = "ep_a2a"
release = version = ep_a2a.__version__
copyright = "the ep_a2a authors, Apache-2.0"  # noqa: A001  Sphinx's name
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "generated_pages"]
exclude_patterns = ["_ext"]
default_role = "literal"
# Links to headings are written as `page.md#a-heading`, as on GitHub.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # else fields of a NamedTuple are described twice
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
html_theme = "furo"
html_title = f"ep_a2a {release}"
html_static_path: list[str] = []
