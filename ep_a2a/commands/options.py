"""What commands do with their options: fields that they set, and those that exclude each other."""

import enum
from collections.abc import Mapping
from typing import Any

from ep_a2a.errors import ConfigError, TopKError, UnknownNameError


class Device(enum.StrEnum):
    """Values of --device."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Quant(enum.StrEnum):
    """Values of --quant: casts inside dispatch that need nothing but the tokens."""

    NONE = "none"
    FP8_PER_TOKEN = "fp8_per_token"
    FP8_PER_1X128 = "fp8_per_1x128"
    MXFP8 = "mxfp8"


OPTIONS_OF_FIELDS = {
    "hidden_dim": ("hidden",),
    "token_hidden_size": ("hidden",),
    "num_experts_per_token": ("topk",),
    "num_experts": ("experts",),
    "num_local_experts": ("experts",),
    "num_experts_per_rank": ("experts",),
    "num_tokens": ("tokens", "max_tokens"),
    "max_tokens": ("max_tokens", "tokens"),
    "max_num_tokens_per_dp_rank": ("max_tokens", "tokens"),
    "max_num_inp_token_per_rank": ("max_tokens", "tokens"),
    "world_size": ("ranks",),
    "num_ep_ranks": ("ranks",),
    "gpu_per_node": ("gpus_per_node",),
    "quant_type": ("quant",),
    "dispatch_quant_type": ("quant",),
}
"""Options that set a field of a configuration or workload, where the names differ. A command's first one is named in
errors about the field."""


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: Mapping[str, Any], when: str, remedy: str) -> None:
    """Raises ConfigError where any of the options is given; `options` holds their values by name."""
    named = ", ".join(f"--{name.replace('_', '-')}" for name in given(options))
    if named:
        raise ConfigError(f"no {named} {when}", named, remedy)


def check_topk(topk: int, num_experts: int) -> None:
    """Raises TopKError unless there are enough experts."""
    if topk > num_experts:
        raise TopKError(f"<= {num_experts}, the number of experts", str(topk), "Lower --topk.", field="topk")


def named_backend(option: str | None, config_file: str | None = None) -> tuple[str, str]:
    """Returns the name of the backend and who chose it, in the order of config.file.choose_backend.

    Raises:
        UnknownNameError: there is no such backend. ConfigError: the config file is wrong.
    """
    from ep_a2a import env
    from ep_a2a.config.file import choose_backend, read_config_file
    from ep_a2a.managers.registry import check_backend_name

    name = choose_backend(option, config_file)
    try:
        check_backend_name(name)
    except UnknownNameError as error:
        error.field = f"--backend or {env.BACKEND.name}"
        raise
    path = config_file or env.CONFIG.get()
    if option:
        return name, "named by --backend"
    if path and read_config_file(path):
        return name, f"named by {path}" if config_file else f"named by {path} ({env.CONFIG.name})"
    return name, f"named by {env.BACKEND.name}" if env.BACKEND.get() else "the default"
