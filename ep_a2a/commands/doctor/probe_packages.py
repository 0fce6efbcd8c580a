"""Describes the installed packages, and whether engines will find this one, without importing them."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import ep_a2a
from ep_a2a.commands.doctor.checks_links import LIBRARIES
from ep_a2a.commands.doctor.system_info import NEEDED_PACKAGES, Atom, Installation, Vllm
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm import support
from ep_a2a.integrations.vllm.signatures import read_signatures

DISTRIBUTION = "ep-a2a"
PLUGIN_GROUP = "vllm.general_plugins"
ATOM_LAYERS = Path("model_ops", "moe.py")
UNKNOWN = "?"
"""Version of a package that lies on the import path without metadata."""
OPTIONAL = ("matplotlib", "cuda-bindings", "nvshmem4py-cu12", "nvshmem4py-cu13", "flashinfer-python", "amd-mori")


def find_installation() -> Installation:
    """Describes how this package is installed, and which others are."""
    plugins = {entry.name for entry in metadata.entry_points(group=PLUGIN_GROUP)}
    return Installation(
        version=ep_a2a.__version__,
        installed_version=_version(DISTRIBUTION),
        vllm_entry_point="ep_a2a" in plugins,
        atom_entry_point="ep_a2a_atom" in plugins,
        packages=_packages(),
        tuned_tables=tuple(sorted(path.name for folder in _table_folders() for path in folder.glob("sm_*.json"))),
    )


def find_vllm() -> Vllm:
    """Describes the vLLM of this environment from its source, as the plugin reads it, without importing it."""
    folder = _folder("vllm")
    if folder is None:
        return Vllm()
    version, problem, differences = support.vllm_version(), "", list[str]()
    try:
        support.check_version()
        differences = support.differences(read_signatures(folder))
    except UnsupportedError as error:
        problem = f"{error.got} is not {error.expected}"
    except (OSError, SyntaxError) as error:
        problem = f"its source cannot be read: {error}"
    return Vllm(version, problem, tuple(differences))


def find_atom() -> Atom:
    """Describes the ATOM of this environment. Another package has its name as well, but not its layers."""
    folder = _folder("atom")
    return Atom(
        version=None if folder is None or not (folder / ATOM_LAYERS).is_file() else _version("atom") or UNKNOWN,
        aiter=None if _folder("aiter") is None else _version("amd-aiter") or _version("aiter") or UNKNOWN,
    )


def _packages() -> dict[str, str]:
    named = {name: version for name in (*NEEDED_PACKAGES, *OPTIONAL) if (version := _version(name))}
    # Only a list of all packages shows two builds of one library.
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name.startswith(LIBRARIES):
            named[name] = distribution.version
    return named


def _table_folders() -> list[Path]:
    """Where tuned tables lie: inside of an installed package, beside that of a checkout."""
    package = Path(ep_a2a.__file__).parent
    return [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()][:1]


def _folder(package: str) -> Path | None:
    """Where a package lies, without importing it; None where there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    return Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
