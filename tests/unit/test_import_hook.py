"""on_import: callbacks around another package's module, also where its first import fails."""

import importlib
import sys

import pytest

from ep_a2a.integrations.atom.activation import on_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module whose first import fails."""
    name = "module_whose_first_import_fails"
    (tmp_path / f"{name}.py").write_text(
        "import sys\nif not hasattr(sys, '_second_try'):\n    raise ImportError('once')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield name
    sys.modules.pop(name, None)


def test_an_import_that_fails_is_watched_again(module, monkeypatch):
    calls = []
    on_import(module, before=lambda: calls.append("before"), after=lambda found: calls.append(found.__name__))
    with pytest.raises(ImportError, match="once"):
        importlib.import_module(module)
    monkeypatch.setattr(sys, "_second_try", True, raising=False)
    importlib.import_module(module)
    assert calls == ["before", "before", module]
    sys.modules.pop(module)
    importlib.import_module(module)
    assert calls == ["before", "before", module]
