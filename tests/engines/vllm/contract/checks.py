"""What the checks of tests/engines/vllm/contract/*_checks.py share; imports vLLM only inside functions."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

NAME, BATCHED = NAMES = "ep_a2a", "ep_a2a_low_latency"
OURS = "/integrations/vllm/"
LOGGER = "vllm.ep_a2a"

replaced = mock.patch.object


def use_cpu() -> None:
    """Before vllm.config is imported. VLLM_TARGET_DEVICE would do only from vLLM 0.28."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()


@contextlib.contextmanager
def refused(kind: type[BaseException], *parts: str) -> Iterator[None]:
    """What is done within must raise an error of this kind whose text has all parts."""
    found: BaseException | None = None
    try:
        yield
    except kind as error:
        found = error
    assert found is not None, f"no {kind.__name__}"
    missing = [part for part in parts if part not in str(found)]
    assert not missing, f"{missing} not in: {found}"


def is_patched(target: str) -> bool:
    """Whether a registry entry's target is ours instead of vLLM's."""
    module, _, name = target.partition(":")
    found: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        found = getattr(found, part)
    if path == ["current_platform"]:
        return last in vars(found)
    owner = getattr(found, last)
    # of a class, ours is a method that was added
    members = vars(owner).values() if isinstance(owner, type) else [owner]
    return any(OURS in member.__code__.co_filename for member in members if hasattr(member, "__code__"))


def our_modules() -> set[str]:
    """Modules of this package's integration that are loaded, by their last name."""
    prefix = "ep_a2a.integrations.vllm."
    return {name.removeprefix(prefix) for name in sys.modules if name.startswith(prefix)}
