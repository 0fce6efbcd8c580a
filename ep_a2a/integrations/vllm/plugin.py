"""Teaches vLLM the name `ep_a2a`; imported by every vLLM process of an environment that has this package installed."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.common import BACKEND_NAME, logger

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTION = "--all2all-backend"
CONFIG_OPTION = "--config"
CONFIG_LINE = re.compile(rf"^\s*['\"]?all2all[-_]backend['\"]?\s*:\s*['\"]?{BACKEND_NAME}\b", re.MULTILINE)


def register() -> None:
    """The entry point. Idempotent; raises only for users whose command line, or its --config, names this backend.

    Raises:
        UnsupportedError: this vLLM's ParallelConfig is not built as any supported version's is.
    """
    try:
        _add_name()
    except Exception as error:
        if names_backend(sys.argv[1:]):
            raise _refusal(error) from error
        logger.debug("%s is not available in this vLLM", BACKEND_NAME, exc_info=error)
        _refuse_when_chosen(error)


def names_backend(arguments: Sequence[str]) -> bool:
    """Whether a command line chooses this backend, itself or by the YAML file of its --config."""
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        option, _, value = argument.partition("=")
        value = value or following
        if option.replace("_", "-") == OPTION and value == BACKEND_NAME:
            return True
        if option == CONFIG_OPTION and CONFIG_LINE.search(_text_of(Path(value))):
            return True
    return False


def _text_of(path: Path) -> str:
    """A file's text, none where it cannot be read: to say so is vLLM's business."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _refusal(error: Exception) -> UnsupportedError:
    from ep_a2a.integrations.vllm.support import SUPPORTED, problems, vllm_version

    found = "; ".join(problems())
    return UnsupportedError(
        f"vLLM {SUPPORTED}",
        f"{vllm_version()}, whose ParallelConfig takes no further backends: {error!r}{found and f' ({found})'}",
        "Install a supported vLLM, or a newer ep-a2a.",
    )


def _refuse_when_chosen(error: Exception) -> None:
    """For those who choose the backend in Python: vLLM's own words would be that there is no such name."""
    parallel = sys.modules.get("vllm.config.parallel")
    config_class = getattr(parallel, "ParallelConfig", None)
    if config_class is None or getattr(config_class.__init__, "is_ours", False):
        return
    original = config_class.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("all2all_backend") == BACKEND_NAME:
            raise _refusal(error) from error
        original(self, *args, **kwargs)

    init.is_ours = True  # type: ignore[attr-defined]
    config_class.__init__ = init


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
            from ep_a2a.integrations.vllm.parallel_config import choose

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
