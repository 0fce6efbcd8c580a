"""Reads the MoE layers of a model from its config.json (Hugging Face), by the keys that vLLM's model files read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.commands.plan.families import find_family, table
from ep_a2a.commands.plan.model_files import EXPERT_DTYPE_KEY
from ep_a2a.config import FP8_DTYPE
from ep_a2a.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ep_a2a.commands.plan.model_files import ModelFiles

REMEDY = "Correct the model's config.json."
DTYPE_KEYS = ("dtype", "torch_dtype")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
NESTED_KEYS = ("text_config", "thinker_config", "llm_config", "language_config")
"""Keys of the language model in models with several kinds of input."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FP8_BITS = 8

MXFP4_EXPERTS = "fp4"
"""A family's `expert_dtype` of experts in MXFP4, or in the format that `moe_quant_algo` names."""
BLOCKS_KEY = "block_configs"
"""Key of a list with an object for each layer, in models whose layers differ."""


@dataclass(frozen=True)
class MoeModel:
    """The MoE layers of a model.

    Attributes:
        model_type: the config's, "" where it has none.
        hidden_dim: elements of a row. num_experts: without redundant ones. topk: experts per token.
        dtype: of activations.
        quantization: the config's quantisation, empty where there is none.
        shares_tokens: tensor-parallel ranks of several replicas each bring a part of their replica's tokens.
        expert_dtype: the experts' own, in families whose experts may have another than `quantization` says; else None.
        read_by: whose model files name the keys; "" where all of this is a guess.
    """

    model_type: str
    hidden_dim: int
    num_experts: int
    topk: int
    dtype: torch.dtype
    quantization: Mapping[str, Any]
    shares_tokens: bool
    expert_dtype: str | None
    read_by: str

    @property
    def quant_method(self) -> str:
        """Name of the quantisation, "none" where there is none."""
        return str(self.quantization.get("quant_method") or "none").lower().replace("_", "-")

    @property
    def has_mxfp4_experts(self) -> bool:
        """Whether the family's experts are MXFP4 beside layers with another quantisation."""
        return self.expert_dtype == MXFP4_EXPERTS and not self.quantization.get("moe_quant_algo")

    @property
    def has_mxfp8_experts(self) -> bool:
        """Whether the experts are MXFP8, as ModelOpt or a checkpoint of vLLM's short name says."""
        return self.quant_method == "mxfp8" or "MXFP8" in str(self.quantization.get("quant_algo")).upper()

    def activation_quant(self) -> SimpleNamespace | None:
        """Returns the part of vLLM's FusedMoEQuantConfig that decides how tokens travel; None where they are not cast.

        It assumes experts that take quantised rows.
        """
        if self.expert_dtype == MXFP4_EXPERTS:
            return None
        if self.quant_method == "fp8":
            return _fp8_quant(self.quantization)
        if self.quant_method == "compressed-tensors":
            return _compressed_tensors_quant(self.quantization)
        return None


def read_model(path: Path, files: ModelFiles | None = None) -> MoeModel:
    """Reads the MoE layers from a config.json, or from the folder that it lies in.

    Args:
        path: of the file or its folder.
        files: an installed vLLM's; None: this package's table says which keys count.

    Raises:
        ConfigError: it cannot be read, or lacks a number that a MoE layer has.
        UnsupportedError: the model has no experts.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = (error.strerror or str(error)) if isinstance(error, OSError) else f"no JSON: {error}"
        raise ConfigError(f"a model's config.json at {file}", found, "Name that file, or its folder.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"a JSON object in {file}", type(values).__name__, "Name the model's config.json.")
    return model_of(values, files)


def model_of(values: Mapping[str, Any], files: ModelFiles | None = None) -> MoeModel:
    """Reads the MoE layers from a parsed config.json; arguments and errors as of read_model."""
    configs = list(_with_nested(values))
    architectures = [each for config in configs for each in _found(config, "architectures", list, "config.json")]
    model_types = [str(config["model_type"]) for config in configs if config.get("model_type")]
    found, read_by = find_family([str(each) for each in architectures], model_types, files)
    usual = table().usual
    family = found or usual
    # Transformers may write a number under another name than vLLM reads it by
    experts, topk, hidden = ((*getattr(family, name), *getattr(usual, name)) for name in ("experts", "topk", "hidden"))
    text = next((config for config in configs if _number(config, experts) > 1), None)
    if text is None:
        raise UnsupportedError(
            f"a model with experts: more than one by {_names(experts)}, there or in {_names(NESTED_KEYS)}",
            "none" + (f" in a config of model_type {values['model_type']!r}" if "model_type" in values else ""),
            "Name the config.json of a mixture-of-experts model; models without experts exchange no tokens.",
        )
    num_experts, num_per_token = _number(text, experts), _required(text, topk)
    if num_per_token > num_experts:
        raise ConfigError(
            f"{_names(topk)} <= {num_experts}, the number of experts", str(num_per_token), "Correct config.json."
        )
    quantization = (_found(config, key, dict, "config.json") for config in configs for key in QUANTIZATION_KEYS)
    return MoeModel(
        str(text.get("model_type") or values.get("model_type") or ""),
        _required(text, hidden),
        num_experts,
        num_per_token,
        _dtype([values, text]),
        next(filter(None, quantization), {}),
        family.shares_tokens,
        family.expert_dtype and str(values.get(EXPERT_DTYPE_KEY) or family.expert_dtype),
        read_by,
    )


def _with_nested(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield values
    for key in NESTED_KEYS:
        if isinstance(nested := values.get(key), Mapping):
            yield from _with_nested(nested)


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """Returns the first number above 0 by the keys, else 0; of a number per layer or block the largest."""
    blocks = config.get(BLOCKS_KEY)
    for key in keys:
        for owners in ([config], blocks if isinstance(blocks, list) else []):
            largest = max((number for owner in owners for number in _numbers(owner, key.split("."))), default=0)
            if largest > 0:
                return largest
    return 0


def _numbers(value: Any, names: list[str]) -> list[int]:
    """Returns the whole numbers that names lead to through nested objects."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]


def _required(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    number = _number(config, keys)
    if not number:
        raise ConfigError(f"a number above 0 by {_names(keys)} beside the number of experts", "none", REMEDY)
    return number


def _dtype(configs: list[Mapping[str, Any]]) -> torch.dtype:
    """Returns vLLM's `--dtype auto`: float32 models, and those without a dtype, have bfloat16 activations."""
    for config in configs:
        name = next((config[key] for key in DTYPE_KEYS if config.get(key)), None)
        if name is not None:
            dtype = DTYPES.get(str(name).removeprefix("torch."), torch.bfloat16)
            return torch.bfloat16 if dtype == torch.float32 else dtype
    return torch.bfloat16


def _fp8_quant(quantization: Mapping[str, Any]) -> SimpleNamespace:
    is_static = quantization.get("activation_scheme") == "static"
    shape = _block_shape("weight_block_size", quantization.get("weight_block_size"))
    return _quant(block_shape=shape, is_static=is_static)


def _compressed_tensors_quant(quantization: Mapping[str, Any]) -> SimpleNamespace | None:
    by_name = _found(quantization, "config_groups", dict, QUANTIZATION_KEYS[0])
    groups = [_found(by_name, name, dict, "config_groups") for name in by_name]
    for_experts = [each for each in groups if any("expert" in str(name) for name in _found(each, "targets", list))]
    group: Mapping[str, Any] = next(iter(for_experts or groups), {})
    inputs, weights = (_found(group, name, dict) for name in ("input_activations", "weights"))
    if inputs.get("type") != "float" or inputs.get("num_bits") != FP8_BITS:
        return None
    block = weights.get("block_structure") if weights.get("strategy") == "block" else None
    if isinstance(block, str):
        # _block_shape refuses what is no number
        block = [int(size) if size.strip().isdecimal() else size for size in block.split("x")]
    shape = _block_shape("block_structure", block)
    by_token = shape is None and inputs.get("strategy") == "token"
    return _quant(block_shape=shape, by_token=by_token, is_static=not inputs.get("dynamic"))


def _found(values: Mapping[str, Any], key: str, kind: type, place: str = "a group of config_groups") -> Any:
    """Returns the JSON object (dict) or list by a key, an empty one where there is none."""
    found = values.get(key) or kind()
    if not isinstance(found, kind):
        what = "a list" if kind is list else "a JSON object"
        raise ConfigError(f"{what} by {key} in {place}", repr(found), REMEDY)
    return found


def _block_shape(key: str, found: Any) -> list[int] | None:
    """Returns rows and columns of a block of weights with one scale; None where there are no blocks."""
    if found is None:
        return None
    are_sizes = isinstance(found, list) and all(type(size) is int and size > 0 for size in found)
    if not are_sizes or len(found) != 2:
        expected = f"two whole numbers above 0 by {key} in {QUANTIZATION_KEYS[0]}"
        raise ConfigError(expected, repr(found), REMEDY)
    sizes: list[int] = found
    return sizes


def _quant(*, block_shape: list[int] | None, by_token: bool = False, is_static: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        quant_dtype=FP8_DTYPE,
        block_shape=block_shape,
        per_act_token_quant=by_token,
        a1_scale="static" if is_static else None,
        a1_gscale=None,
    )


def _names(keys: tuple[str, ...]) -> str:
    return ", ".join(map(repr, dict.fromkeys(keys)))
