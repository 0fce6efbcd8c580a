"""Turns the handle kwargs of vLLM and AITER into a configuration, by the table of AITER's MORI guide and our extras."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from ep_a2a import config
from ep_a2a.config.enums import inter_node_kernel
from ep_a2a.config.requirements import HANDLE_KWARG_REMEDY, checked_integer
from ep_a2a.errors import ConfigError, UnknownNameError, did_you_mean, shown

CONFIG_FIELD_OF_KWARG = {
    "rank": "rank",
    "num_ep_ranks": "world_size",
    "token_hidden_size": "hidden_dim",
    "max_num_tokens_per_dp_rank": "max_num_inp_token_per_rank",
    "num_local_experts": "num_experts_per_rank",
    "num_experts_per_token": "num_experts_per_token",
}
"""Required kwargs that become a config field unchanged, and the field's name."""
KWARG_OF_CONFIG_FIELD = {field: kwarg for kwarg, field in CONFIG_FIELD_OF_KWARG.items()}

REQUIRED_KWARGS = (*CONFIG_FIELD_OF_KWARG, "input_dtype", "quant_dtype")
OPTIONAL_KWARGS = ("scale_dim", "scale_type_size", "gpu_per_node", "quant_type")
EXTRA_KWARGS = (
    "max_total_recv_tokens",
    "use_external_inp_buf",
    *(each.name for each in fields(config.EpDispatchCombineConfig) if each.kw_only),
)
"""Kwargs of this package, which set the config field of the same name."""

WARPS_PER_BLOCK = 16
INTER_NODE_LAUNCH = {"block_num": 32, "rdma_block_num": 16}
MORI_GPUS_PER_NODE = 8


def config_from_handle_kwargs(kwargs: Mapping[str, Any], topology_internode: bool) -> config.EpDispatchCombineConfig:
    """Returns the configuration that handle kwargs ask for.

    Args:
        kwargs: `rank`, `num_ep_ranks`, `input_dtype`, `quant_dtype`, `token_hidden_size`,
            `max_num_tokens_per_dp_rank`, `num_local_experts`, `num_experts_per_token`; optionally `scale_dim`,
            `scale_type_size` (0), `gpu_per_node` (all ranks on one node, at most 8 on several), `quant_type` ("none")
            and the config fields in EXTRA_KWARGS. `quant_dtype` is the dtype that travels, None for `input_dtype`;
            with a `quant_type` that casts inside dispatch it is the dtype of the received rows, and must be fp8.
        topology_internode: whether the group spans several nodes; selects the kernel and its launch numbers.

    Raises:
        UnknownNameError: a kwarg is not known.
        ConfigError: a kwarg is missing, or the config refuses its value.
    """
    _check_names(kwargs)
    data_type, combine_dtype = _dtypes(kwargs)
    values: dict[str, Any] = {field: kwargs[name] for name, field in CONFIG_FIELD_OF_KWARG.items()}
    if topology_internode:
        values |= INTER_NODE_LAUNCH | {"kernel_type": inter_node_kernel(kwargs["max_num_tokens_per_dp_rank"])}
    widest = max(kwargs["input_dtype"].itemsize, (kwargs.get("combine_dtype") or kwargs["input_dtype"]).itemsize)
    values |= {
        "data_type": data_type,
        "combine_dtype": combine_dtype,
        "scale_dim": kwargs.get("scale_dim", 0),
        "scale_type_size": kwargs.get("scale_type_size", 0),
        "max_token_type_size": widest,
        "warp_num_per_block": WARPS_PER_BLOCK,
    }
    given = {name: kwargs[name] for name in ("gpu_per_node", "quant_type", *EXTRA_KWARGS) if name in kwargs}
    try:
        world_size = checked_integer("num_ep_ranks", kwargs["num_ep_ranks"], 1)
        values["gpu_per_node"] = min(MORI_GPUS_PER_NODE, world_size) if topology_internode else world_size
        return config.EpDispatchCombineConfig(**values | given)
    except ConfigError as error:
        error.field = KWARG_OF_CONFIG_FIELD.get(error.field or "", error.field)
        error.remedy = HANDLE_KWARG_REMEDY
        raise


def _check_names(kwargs: Mapping[str, Any]) -> None:
    known = (*REQUIRED_KWARGS, *OPTIONAL_KWARGS, *EXTRA_KWARGS)
    unknown = [name for name in kwargs if name not in known]
    if unknown:
        hints = " ".join(filter(None, (did_you_mean(name, known) for name in unknown)))
        remedy = f"{hints} Remove the kwarg or correct its name.".strip()
        raise UnknownNameError(f"handle kwargs out of {', '.join(known)}", ", ".join(map(repr, unknown)), remedy)
    missing = [name for name in REQUIRED_KWARGS if name not in kwargs]
    if missing:
        expected = f"the handle kwargs {', '.join(REQUIRED_KWARGS)}"
        raise ConfigError(expected, f"none named {', '.join(missing)}", "Add the missing kwargs.")
    for name in ("input_dtype", "quant_dtype", "combine_dtype"):
        value = kwargs.get(name)
        if not isinstance(value, torch.dtype) and (value is not None or name == "input_dtype"):
            raise ConfigError("to be a torch.dtype", shown(value), field=name)


def _dtypes(kwargs: Mapping[str, Any]) -> tuple[torch.dtype, torch.dtype | None]:
    """Returns data_type and combine_dtype."""
    input_dtype: torch.dtype = kwargs["input_dtype"]
    quant_dtype: torch.dtype = kwargs["quant_dtype"] or input_dtype
    if _casts_in_dispatch(kwargs):
        if quant_dtype != config.FP8_DTYPE:
            expected, found = f"{config.FP8_DTYPE} with a cast inside dispatch", str(kwargs["quant_dtype"])
            remedy = "Pass the dtype that dispatch shall return, or quant_type='none'."
            raise ConfigError(expected, found, remedy, field="quant_dtype")
        return input_dtype, None
    # Experts return rows of the dtype the model computes in, whatever travelled.
    original = input_dtype if quant_dtype == config.FP8_DTYPE and input_dtype in config.COMBINE_DTYPES else None
    return quant_dtype, original


def _casts_in_dispatch(kwargs: Mapping[str, Any]) -> bool:
    chosen = kwargs.get("dispatch_quant_type")
    name = "quant_type" if chosen is None else "dispatch_quant_type"
    quant_type: config.QuantType = config.parse_enum(config.QuantType, kwargs.get(name, "none"), name)
    return quant_type in config.DISPATCH_QUANT_TYPES and quant_type is not config.QuantType.NONE
