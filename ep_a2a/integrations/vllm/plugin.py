"""The entry point: adds this backend's names to vLLM's. Every vLLM process of the environment imports this."""

import functools
import multiprocessing
import re
import sys
from typing import Any, Literal, get_args, get_origin

from ep_a2a import env
from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.common import BACKEND_NAME, NAMES, logger, warn_once

OLD_VARIABLE = "VLLM_ALL2ALL_BACKEND"
CHOICE = re.compile(rf"--all2all[-_]backend[= ]({'|'.join(NAMES)})\b")


def register() -> None:
    """Adds the backend's names. Idempotent; raises only if the command line has one of them.

    A command that names it is refused here, before vLLM loads a model's configuration or starts a process.

    Raises:
        UnsupportedError: this vLLM lacks what the integration uses.
    """
    is_chosen = CHOICE.search(" ".join(sys.argv[1:]))
    # processes that multiprocessing starts have their parent's command line
    is_first = multiprocessing.parent_process() is None
    if is_chosen and is_first:
        from ep_a2a.integrations.vllm.support import check

        check()
    if is_first and env.other_variable(OLD_VARIABLE) in NAMES:
        warn_once(f"{OLD_VARIABLE} has no effect: choose the backend by --all2all-backend {BACKEND_NAME}")
    try:
        _add_name()
    except Exception as error:
        if is_chosen:
            raise UnsupportedError(
                "a vLLM to whose backends a name can be added", repr(error), "Install a supported vLLM."
            ) from error
        logger.debug("%s is not available in this vLLM", BACKEND_NAME, exc_info=error)


@functools.cache
def _add_name() -> None:
    """Patches `backend-name` and `chosen-config`."""
    from vllm.config import parallel

    config_class = parallel.ParallelConfig
    original_post_init = config_class.__post_init__

    def post_init(self: Any, *args: Any) -> None:
        original_post_init(self, *args)
        if self.all2all_backend in NAMES:
            from ep_a2a.integrations.vllm.parallel_config import choose

            choose(self)

    config_class.__post_init__ = post_init
    # a vLLM with a registry of backends (PR #50556) takes every name
    if get_origin(parallel.All2AllBackend) is Literal:
        _extend_literal(parallel)


def _extend_literal(parallel: Any) -> None:
    from pydantic.dataclasses import rebuild_dataclass

    config_class = parallel.ParallelConfig
    names = Literal[(*get_args(parallel.All2AllBackend), *NAMES)]  # type: ignore[valid-type]
    parallel.All2AllBackend = names
    config_class.__annotations__["all2all_backend"] = names
    config_class.__dataclass_fields__["all2all_backend"].type = names
    config_class.__pydantic_fields__["all2all_backend"].annotation = names
    rebuild_dataclass(config_class, force=True)
    # a module that is not imported yet has cached nothing
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is not None:
        arg_utils._compute_kwargs.cache_clear()
