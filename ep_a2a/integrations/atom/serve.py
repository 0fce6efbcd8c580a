"""Starts ATOM's own server, which loads no plugins, with the backend that EP_A2A_BACKEND names.

EP_A2A_BACKEND=ep_a2a python -m ep_a2a.integrations.atom.serve atom.entrypoints.openai_server --model ...

The processes that ATOM starts begin by importing this module, since it is their parent's main module, so that the
switch reaches them as well. Without EP_A2A_BACKEND, ATOM runs as it is.
"""

from __future__ import annotations

import runpy
import sys

from ep_a2a.errors import ConfigError
from ep_a2a.integrations.atom.switch import activate


def main(arguments: list[str]) -> None:
    """Runs a module as `python -m` does.

    Args:
        arguments: its name, and what it gets as its arguments.

    Raises:
        ConfigError: there is no name.
    """
    if not arguments:
        raise ConfigError(
            "the name of ATOM's module and its options", "none",
            "For example: python -m ep_a2a.integrations.atom.serve atom.entrypoints.openai_server --model MODEL",
        )  # fmt: skip
    sys.argv = arguments
    # the main module stays this one, for the processes that the module will start
    runpy.run_module(arguments[0], run_name="__main__")


if __name__ in ("__main__", "__mp_main__"):
    activate()
if __name__ == "__main__":
    main(sys.argv[1:])
