"""Lets a CPU import SGLang's sources without the packages that its MoE layers do not use, and without its kernels."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

KERNELS = "sgl_kernel"
UNUSED = ("IPython", "dill", "gguf", "orjson", "partial_json_parser", "pybase64", "sentencepiece", "torchvision")
"""Packages for tokenizers, images and files."""


class _Names(type):
    """Gives a class every public attribute, each another text."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StandIn(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Names(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        is_absent = name.partition(".")[0] in (KERNELS, *UNUSED)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to execute."""


def install() -> None:
    """Before SGLang is imported. Packages that are installed keep their own modules."""
    # asks once for torchvision, and must hear no
    import transformers.image_utils  # noqa: F401

    sys.meta_path.append(_Finder())
    import dill

    dill.dumps = lambda value: b""  # type: ignore[attr-defined]
