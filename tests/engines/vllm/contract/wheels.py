"""Real vLLM releases for tests: their Python files, and a Python that has what these import."""

import importlib.util
import sys
from pathlib import Path

from tests.wheels import DOWNLOAD_TIMEOUT_SECS as DOWNLOAD_TIMEOUT_SECS
from tests.wheels import Release
from tests.wheels import Unavailable as Unavailable

ROOT = Path(__file__).resolve().parents[4]
VERSIONS = ("0.26.0", "0.28.0", "0.33.0")
"""Lowest, middle and newest of those that are supported."""
NEWEST = VERSIONS[-1]

PYTHON_WITH_DEPENDENCIES = ROOT / ".venv-vllm" / "bin" / "python"
"""Made by `make test-vllm`."""
DEPENDENCIES = ("transformers", "pydantic", "cbor2", "msgspec", "zmq", "openai", "xgrammar", "fastapi", "psutil")


def wheel_folder(version: str) -> Path:
    """The folder with `vllm` and its METADATA of a release; see tests.wheels."""
    return Release("vllm", version, abis=("abi3", "cp38")).folder()


def metadata_path(folder: Path, version: str) -> Path:
    return folder / f"vllm-{version}.dist-info" / "METADATA"


def python_with_dependencies() -> Path:
    """A Python that has the packages which vLLM imports.

    Raises:
        Unavailable: there is none.
    """
    missing = [name for name in DEPENDENCIES if importlib.util.find_spec(name) is None]
    if not missing:
        return Path(sys.executable)
    if PYTHON_WITH_DEPENDENCIES.exists():
        return PYTHON_WITH_DEPENDENCIES
    raise Unavailable(f"vLLM's dependencies are not installed ({', '.join(missing)}); `make test-vllm` installs them")


def symbol_of(target: str) -> str:
    """A registry entry's target as the table of signatures names it: "file:name"."""
    module, _, name = target.partition(":")
    if module == "vllm.platforms":
        # the patch lies on the platform object, in front of its class
        return f"platforms/interface.py:{name.replace('current_platform', 'Platform')}"
    return f"{module.removeprefix('vllm.').replace('.', '/')}.py:{name}"
