"""The entry point: adds the name `ep_a2a` to vLLM's backends. Every vLLM process of the environment imports this."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from ep_a2a.errors import UnsupportedError
from ep_a2a.integrations.vllm.common import BACKEND_NAME, is_replacement, logger, replacement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OPTION = "--all2all-backend"
CONFIG_OPTION = "--config"
CONFIG_LINE = re.compile(rf"^\s*['\"]?all2all[-_]backend['\"]?\s*:\s*['\"]?{BACKEND_NAME}\b", re.MULTILINE)


def register() -> None:
    """Adds the backend's name. Idempotent; raises only if the command line, or its --config, names this backend.

    A command that names it is refused here, before vLLM loads a model's configuration or starts a process.

    Raises:
        UnsupportedError: this vLLM lacks what the integration uses.
    """
    # processes that multiprocessing starts have their parent's command line
    if multiprocessing.parent_process() is None and names_backend(sys.argv[1:]):
        from ep_a2a.integrations.vllm.support import check

        check()
    try:
        _add_name()
    except Exception as error:
        if names_backend(sys.argv[1:]):
            raise _refusal(error) from error
        logger.debug("%s is not available in this vLLM", BACKEND_NAME, exc_info=error)
        _refuse_when_chosen(error)


def names_backend(arguments: Sequence[str]) -> bool:
    """Whether a command line, or the YAML file of its --config, chooses this backend."""
    for argument, following in zip(arguments, [*arguments[1:], ""]):
        option, _, value = argument.partition("=")
        value = value or following
        if option.replace("_", "-") == OPTION and value == BACKEND_NAME:
            return True
        if option == CONFIG_OPTION and CONFIG_LINE.search(_text_of(Path(value))):
            return True
    return False


def _text_of(path: Path) -> str:
    """The file's text, or "" if it cannot be read: vLLM reports that itself."""
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _refusal(error: Exception) -> UnsupportedError:
    from ep_a2a.integrations.vllm.support import SUPPORTED, problems, vllm_version

    return UnsupportedError(
        f"vLLM {SUPPORTED}",
        f"{vllm_version()}: " + "; ".join([f"its ParallelConfig takes no further backends: {error!r}", *problems()]),
        "Install a supported vLLM, or a newer ep-a2a.",
    )


def _refuse_when_chosen(error: Exception) -> None:
    """Makes ParallelConfig(all2all_backend="ep_a2a") raise the refusal; vLLM's own error would be an unknown name."""
    parallel = sys.modules.get("vllm.config.parallel")
    config_class = getattr(parallel, "ParallelConfig", None)
    if config_class is None or is_replacement(config_class.__init__):
        return
    original = config_class.__init__

    @replacement
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("all2all_backend") == BACKEND_NAME:
            raise _refusal(error) from error
        original(self, *args, **kwargs)

    config_class.__init__ = init


def _add_name() -> None:
    """Patches `backend-name` and `chosen-config`."""
    from vllm.config import parallel

    config_class = parallel.ParallelConfig
    original_post_init = config_class.__post_init__
    if is_replacement(original_post_init):
        return

    @replacement
    def post_init(self: Any, *args: Any) -> None:
        original_post_init(self, *args)
        if self.all2all_backend == BACKEND_NAME:
            from ep_a2a.integrations.vllm.parallel_config import choose

            choose(self)

    with _unchanged_after_errors(parallel):
        config_class.__post_init__ = post_init
        # a vLLM with a registry of backends (PR #50556) takes every name
        if get_origin(parallel.All2AllBackend) is Literal:
            _extend_literal(parallel)


@contextlib.contextmanager
def _unchanged_after_errors(parallel: Any) -> Iterator[None]:
    """Gives ParallelConfig back as it was where adding the name fails: other backends' users must not notice."""
    config_class, names = parallel.ParallelConfig, parallel.All2AllBackend
    attributes = dict(vars(config_class))
    annotations = dict(attributes.get("__annotations__", {}))
    field = attributes.get("__dataclass_fields__", {}).get("all2all_backend")
    pydantic_field = attributes.get("__pydantic_fields__", {}).get("all2all_backend")
    types = getattr(field, "type", None), getattr(pydantic_field, "annotation", None)
    try:
        yield
    except BaseException:
        parallel.All2AllBackend = names
        if annotations:
            config_class.__annotations__.update(annotations)
        if field is not None:
            field.type = types[0]
        if pydantic_field is not None:
            pydantic_field.annotation = types[1]
        for name, value in attributes.items():
            if vars(config_class).get(name) is not value:
                setattr(config_class, name, value)
        for name in set(vars(config_class)) - set(attributes):
            delattr(config_class, name)
        raise


def _extend_literal(parallel: Any) -> None:
    from pydantic.dataclasses import rebuild_dataclass

    config_class = parallel.ParallelConfig
    names = Literal[(*get_args(parallel.All2AllBackend), BACKEND_NAME)]  # type: ignore[valid-type]
    parallel.All2AllBackend = names
    config_class.__annotations__["all2all_backend"] = names
    config_class.__dataclass_fields__["all2all_backend"].type = names
    config_class.__pydantic_fields__["all2all_backend"].annotation = names
    rebuild_dataclass(config_class, force=True)
    # a module that is not imported yet has cached nothing
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is not None:
        arg_utils._compute_kwargs.cache_clear()
