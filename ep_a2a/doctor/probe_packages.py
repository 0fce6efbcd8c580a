"""Which packages are installed, and whether engines will find this one. Nothing of theirs is imported."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import ep_a2a
from ep_a2a.doctor.machine import Atom, Installation, Vllm
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm import support
from ep_a2a.integrations.vllm.signatures import read_signatures

DISTRIBUTION = "ep-a2a"
PLUGIN_GROUP = "vllm.general_plugins"
NEEDED = ("numpy", "typer", "rich")
"""What this package imports beside torch and Triton."""
OPTIONAL = ("matplotlib", "cuda-bindings", "nvshmem4py-cu12", "nvshmem4py-cu13", "flashinfer-python", "amd-mori")
LIBRARIES = ("nvidia-nccl-", "nvidia-nvshmem-")
"""Beginnings of the names of packages that bring a library; what follows is the CUDA version."""


def find_installation() -> Installation:
    """How this package is installed, and what beside it."""
    return Installation(
        version=ep_a2a.__version__,
        installed_version=_version(DISTRIBUTION),
        vllm_entry_point=any(entry.name == "ep_a2a" for entry in metadata.entry_points(group=PLUGIN_GROUP)),
        packages=_packages(),
        tuned_tables=tuple(sorted(path.name for folder in _table_folders() for path in folder.glob("sm_*.json"))),
    )


def find_vllm() -> Vllm:
    """The vLLM of this environment, read as the plugin reads it: from its source, without importing it."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return Vllm()
    version, problem, differences = support.vllm_version(), "", list[str]()
    try:
        support.check_version()
        differences = support.differences(read_signatures(Path(spec.submodule_search_locations[0])))
    except UnsupportedError as error:
        problem = f"{error.got} is not {error.expected}"
    except (OSError, SyntaxError) as error:
        problem = f"its source cannot be read: {error}"
    return Vllm(version, problem, tuple(differences))


def find_atom() -> Atom:
    """The ATOM of this environment."""
    has_integration = importlib.util.find_spec("ep_a2a.integrations.atom") is not None
    return Atom(_version("atom"), _version("aiter") or _version("amd-aiter"), has_integration)


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


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
