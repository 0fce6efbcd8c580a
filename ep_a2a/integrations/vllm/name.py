"""Teaches vLLM the name `ep_a2a`; imported by every vLLM process of an environment that has this package installed."""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args, get_origin

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.common import BACKEND_NAME, logger


def register() -> None:
    """The entry point. Idempotent; raises only for users whose command line names this backend.

    Raises:
        UnsupportedError: this vLLM's ParallelConfig is not built as any supported version's is.
    """
    from ep_a2a.integrations.vllm.support import SUPPORTED, vllm_version

    try:
        _add_name()
    except Exception as error:
        if not any(argument.endswith(BACKEND_NAME) for argument in sys.argv):
            logger.debug("%s is not available in this vLLM", BACKEND_NAME, exc_info=error)
            return
        raise UnsupportedError(
            f"vLLM {SUPPORTED}", f"{vllm_version()}, whose ParallelConfig takes no further backends: {error!r}",
            "Install a supported vLLM, or a newer ep-a2a.",
        ) from error  # fmt: skip


def _add_name() -> None:
    """Patches `backend-name` and `chosen-config` of the ledger."""
    from vllm.config import parallel

    config_class = parallel.ParallelConfig
    original_post_init = config_class.__post_init__
    if getattr(original_post_init, "is_ours", False):
        return

    def post_init(self: Any, *args: Any) -> None:
        original_post_init(self, *args)
        if self.all2all_backend == BACKEND_NAME:
            from ep_a2a.integrations.vllm.chosen import choose

            choose(self)

    post_init.is_ours = True  # type: ignore[attr-defined]
    config_class.__post_init__ = post_init
    # a vLLM with a registry of backends (PR #50556) takes every name
    if get_origin(parallel.All2AllBackend) is Literal:
        _extend_literal(parallel)


def _extend_literal(parallel: Any) -> None:
    from pydantic.dataclasses import rebuild_dataclass

    config_class = parallel.ParallelConfig
    names = Literal[(*get_args(parallel.All2AllBackend), BACKEND_NAME)]  # type: ignore[valid-type]
    parallel.All2AllBackend = names
    config_class.__annotations__["all2all_backend"] = names
    config_class.__dataclass_fields__["all2all_backend"].type = names
    config_class.__pydantic_fields__["all2all_backend"].annotation = names
    rebuild_dataclass(config_class, force=True)
    # where it is not loaded yet it has nothing cached
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is not None:
        arg_utils._compute_kwargs.cache_clear()
