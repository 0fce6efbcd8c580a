"""Which packages are installed, and whether engines will find this one. Nothing of theirs is imported."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import ep_a2a
from ep_a2a.commands.doctor.system_info import Atom, Installation, Vllm
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm import support
from ep_a2a.integrations.vllm.signatures import read_signatures

DISTRIBUTION = "ep-a2a"
PLUGIN_GROUP = "vllm.general_plugins"
ATOM_LAYERS = Path("model_ops", "moe.py")
UNKNOWN = "?"
"""Version of a package that lies on the import path without metadata."""
NEEDED = ("numpy", "typer", "rich")
"""What this package imports beside torch and Triton."""
OPTIONAL = ("matplotlib", "cuda-bindings", "nvshmem4py-cu12", "nvshmem4py-cu13", "flashinfer-python", "amd-mori")
LIBRARIES = ("nvidia-nccl-", "nvidia-nvshmem-")
"""Beginnings of the names of packages that bring a library; what follows is the CUDA version."""


def find_installation() -> Installation:
    """How this package is installed, and what beside it."""
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
    """The vLLM of this environment, read as the plugin reads it: from its source, without importing it."""
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
    """The ATOM of this environment. Another package has its name as well, but not its layers."""
    folder = _folder("atom")
    return Atom(
        version=None if folder is None or not (folder / ATOM_LAYERS).is_file() else _version("atom") or UNKNOWN,
        aiter=None if _folder("aiter") is None else _version("amd-aiter") or _version("aiter") or UNKNOWN,
    )


def _packages() -> dict[str, str]:
    named = {name: version for name in (*NEEDED, *OPTIONAL) if (version := _version(name))}
    # Two builds of one library in an environment are a fault that only a list of all packages shows.
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
