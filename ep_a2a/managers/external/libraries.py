"""Imports other projects' libraries when they are needed, and reports why one cannot be used."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from typing import Any

from ep_a2a.errors import MissingPackageError

OWN_PACKAGE = "ep_a2a"


@dataclass(frozen=True)
class Library:
    """A Python package that a backend needs.

    Attributes:
        module: name of the imported module.
        distribution: name of the package in registries; its metadata has the version.
        install: how to install it, for errors.
        least_version: the lowest version with all that is called; "" for any.
        needs: attributes, "module:name" or "module" below `module`, that must exist.
    """

    module: str
    distribution: str
    install: str
    least_version: str = ""
    needs: tuple[str, ...] = ()

    @property
    def version(self) -> str | None:
        """The installed version; None without package metadata."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def problem(self) -> str | None:
        """Returns why the library cannot be used on this machine, None if it can. Imports it; cached per process.

        A module of this package under the library's name (`ep_a2a.compat.mori.install()`) is not the library. It may
        come and go, so each call looks for it. A manager on this package's own modules needs a Library that names them,
        `Library("ep_a2a", ...)`.
        """
        return self.stand_in_problem() or _problem(self)

    def stand_in_problem(self) -> str | None:
        """Returns a sentence if a module of this package has the library's name in this process; imports nothing."""
        found = getattr(sys.modules.get(self.module), "__name__", "")
        if self.module.partition(".")[0] == OWN_PACKAGE or found.partition(".")[0] != OWN_PACKAGE:
            return None
        return f"{self.module} is {OWN_PACKAGE}'s own stand-in in this process, {found}, not the library"

    def load(self, name: str = "") -> Any:
        """Returns the module `module[.name]`.

        Raises:
            MissingPackageError: it is not installed, too old, or cannot be imported; the error says which.
        """
        self.require()
        return importlib.import_module(f"{self.module}.{name}" if name else self.module)

    def require(self) -> None:
        """Raises MissingPackageError if the library cannot be used; see `load`."""
        problem = self.problem()
        if problem is not None:
            remedy = f"To install it: {self.install}."
            if self.stand_in_problem() is not None:
                remedy = f"Choose the backend 'ep_a2a', or call ep_a2a.compat.uninstall({self.module!r}). {remedy}"
            raise MissingPackageError(f"the package {self.distribution} (import {self.module})", problem, remedy)


@functools.cache
def _problem(library: Library) -> str | None:
    if importlib.util.find_spec(library.module) is None:
        return f"{library.distribution} is not installed"
    version = library.version
    found = f"{library.distribution} {version or 'of unknown version'}"
    if version and library.least_version and _numbers(version) < _numbers(library.least_version):
        return f"{found} is installed, and {library.least_version} or later is needed"
    for need in ("", *library.needs):
        submodule, _, name = need.partition(":")
        full = f"{library.module}.{submodule}" if submodule else library.module
        try:
            module = importlib.import_module(full)
            missing = bool(name) and not hasattr(module, name)
        except Exception as error:  # noqa: BLE001  a broken library may raise anything, and it is reported
            return f"{found} is installed, but import {full} raised {type(error).__name__}: {error}"
        if missing:
            return f"{found} is installed, and has no {full}.{name}"
    return None


def _numbers(version: str) -> list[int]:
    """Returns the leading numbers of a version, for comparisons."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in leading[0].split(".")] if leading else []
