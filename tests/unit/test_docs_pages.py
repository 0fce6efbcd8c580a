"""The parts of the site that are made from the code."""

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from ep_a2a import env, errors
from ep_a2a.config import EpDispatchCombineConfig
from tests.engines.vllm.contract.patch_registry import PATCHES

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PAGES = sorted(path for folder in (DOCS, DOCS / "results") for path in folder.glob("*.md"))
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EpA2AError)]


def load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


pages = load("generated_pages", DOCS / "_ext" / "generated_pages.py")


def test_every_error_has_an_anchor_a_reason_and_a_remedy():
    text = pages.part("errors")
    for kind in ERRORS:
        section = re.search(rf"^\({kind.__name__.lower()}\)=\n## {kind.__name__}\n\n(.+?)(?=^\(|\Z)", text, re.M | re.S)
        assert section, kind
        assert (kind.__doc__ or "").split("\n")[0] in section[1]
        assert f"*Remedy:* {kind.remedy}" in section[1]


def test_every_error_is_a_symptom_or_a_base():
    text = (DOCS / "troubleshooting.md").read_text()
    bases = {base for kind in ERRORS for base in kind.__bases__}
    listed = {kind for kind in ERRORS if f"errors.md#{kind.__name__.lower()})" in text}
    # a bench reports it as a row; its subclasses are listed as one symptom
    spared = {errors.CheckFailedError, errors.DeviceError, errors.HiddenSizeError, errors.TopKError}
    assert set(ERRORS) - listed - bases <= spared


def test_every_option_is_listed_as_typed():
    text = pages.part("commands")
    sections = dict(re.findall(r"^## ep-a2a (\w+)\n(.*?)(?=^\(ep-a2a-|\Z)", text, re.M | re.S))
    assert list(sections) == ["demo", "bench", "trace", "plan", "backends", "doctor"]
    assert "`--json" in sections["demo"]
    assert "as-json" not in text
    assert "`--selftest / --no-selftest`" in sections["doctor"]


def test_every_field_has_a_meaning():
    meanings = pages.sections(EpDispatchCombineConfig.__doc__)[1]
    assert not [field.name for field in dataclasses.fields(EpDispatchCombineConfig) if not meanings.get(field.name)]
    text = pages.part("config_fields")
    assert all(f"| `{field.name}` |" in text for field in dataclasses.fields(EpDispatchCombineConfig))


def test_tables_cannot_be_broken_by_their_text():
    made = pages.table(("a", "b"), [("x|y", "one\ntwo"), (1, None)])
    assert made.splitlines()[2:] == [r"| x\|y | one two |", "| 1 | None |"]


@pytest.mark.parametrize("page", ["arguments", "backends", "cli", "configuration", "env", "errors", "protocol", "vllm"])
def test_the_site_fills_in_what_the_checkout_names_in_one_line(page: str):
    text = (DOCS / f"{page}.md").read_text()
    committed = re.findall(r"<!-- generated: (\w+) -->\n([^\n]+)\n<!-- end -->", text)
    assert [name for name, _ in committed] == pages.MARK.findall(text) != []
    content = [text]
    pages.read_page(None, page, content)
    for name, line in committed:
        assert line not in content[0]
        assert pages.PAGE.sub(r"[\1](\1.md)", pages.part(name)) in content[0]


def test_the_parts_know_everything_they_list():
    assert all(variable.name in pages.part("environment") for variable in env.VARIABLES)
    assert all(patch.name in pages.part("vllm_patches") for patch in PATCHES)


def test_every_page_is_in_the_index():
    listed = (DOCS / "index.md").read_text().splitlines()
    assert not [path for path in PAGES if path.name != "index.md" and str(path.relative_to(DOCS))[:-3] not in listed]
