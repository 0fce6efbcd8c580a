"""Starts ATOM's own server, which loads no plugins, with the backend that EP_A2A_BACKEND names.

EP_A2A_BACKEND=ep_a2a python -m ep_a2a.integrations.atom.serve atom.entrypoints.openai_server --model ...

Processes that ATOM spawns import their parent's main module first. That is this module, so the backend is active in
them as well. Without EP_A2A_BACKEND ATOM is not changed.
"""

import runpy
import sys

from ep_a2a.errors import ConfigError
from ep_a2a.integrations.atom.activation import activate


def main(arguments: list[str]) -> None:
    """Runs a module as `python -m` does.

    Args:
        arguments: the module's name, then its command line.

    Raises:
        ConfigError: the list is empty.
    """
    if not arguments:
        raise ConfigError("ATOM's module and its options", "none", "Add atom.entrypoints.openai_server --model MODEL.")
    sys.argv = arguments
    # this stays the main module, for the processes that ATOM spawns
    runpy.run_module(arguments[0], run_name="__main__")


if __name__ in ("__main__", "__mp_main__"):
    activate()
if __name__ == "__main__":
    main(sys.argv[1:])
