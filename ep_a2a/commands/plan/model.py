"""Reads the MoE layers of a model from its config.json (Hugging Face), by the keys that vLLM's model files read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ep_a2a.commands.plan.families import EXPERT_DTYPE_KEY, find_family, table
from ep_a2a.commands.plan.quantization import REMEDY, Quantization, found, read_quantization
from ep_a2a.config import MAX_TOPK
from ep_a2a.config.requirements import MAX_INTEGER
from ep_a2a.errors import ConfigError, UnsupportedError, shown
from ep_a2a.whole_files import read_file

CONFIG_FILE, QUANTIZATION_FILE, MISTRAL_FILE = "config.json", "hf_quant_config.json", "params.json"
"""A model's file, one beside it, and one in its place."""
DTYPE_KEYS = ("dtype", "torch_dtype")
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
NESTED_KEYS = ("text_config", "thinker_config", "llm_config", "language_config")
"""Keys of the language model in models with several kinds of input."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_LAYERS = 128
"""Layers that are looked at where a config does not say how many there are."""

LAYER_KEYS, DENSE_LAYERS_KEY = ("num_hidden_layers", "num_layers", "n_layers"), "first_k_dense_replace"
BLOCKS_KEY = "block_configs"
"""Key of a list with an object for each layer, in models whose layers differ."""


@dataclass(frozen=True)
class MoeModel:
    """The MoE layers of a model.

    Attributes:
        model_type: the config's, "" where it has none.
        hidden_dim: elements of a row. num_experts: without redundant ones. topk: experts per token.
        dtype: of activations.
        quantization: of the experts.
        shares_tokens: tensor-parallel ranks of several replicas each bring a part of their replica's tokens.
        is_known: model files of vLLM name the keys; else all of this is a guess.
    """

    model_type: str
    hidden_dim: int
    num_experts: int
    topk: int
    dtype: torch.dtype
    quantization: Quantization
    shares_tokens: bool
    is_known: bool


def read_model(path: Path) -> MoeModel:
    """Reads the MoE layers from a config.json or params.json (Mistral), or from the folder that it lies in.

    A quantisation that config.json lacks is read from the hf_quant_config.json beside it.

    Args:
        path: of the file or its folder.

    Raises:
        ConfigError: it cannot be read, or a value that a MoE layer has is missing or of another type.
        UnsupportedError: the model has no experts.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists() and (path / MISTRAL_FILE).exists():
        file = path / MISTRAL_FILE
    values, remedy = _read_object(file), f"Correct {file}."
    beside = file.with_name(QUANTIZATION_FILE)
    try:
        if not any(config.get(key) for config in _with_nested(values) for key in QUANTIZATION_KEYS) and beside.exists():
            remedy = f"Correct {file} or {beside}."
            values = {**values, QUANTIZATION_KEYS[0]: _read_object(beside)}
        return model_of(values)
    except ConfigError as error:
        error.remedy = remedy
        raise


def _read_object(file: Path) -> dict[str, Any]:
    remedy = f"Correct {file}." if file.is_file() else "Name that file, or its folder."
    values = read_file(file, "a model's config.json", remedy, json.loads)
    if not isinstance(values, dict):
        raise ConfigError(f"a JSON object in {file}", type(values).__name__, remedy)
    return values


def model_of(values: Mapping[str, Any]) -> MoeModel:
    """Reads the MoE layers from a parsed config.json; arguments and errors as of read_model."""
    values = _without_mistrals_names(values)
    configs = _with_nested(values)
    architectures = [each for config in configs for each in found(config, "architectures", list, CONFIG_FILE)]
    model_types = [found(config, "model_type", str, CONFIG_FILE) for config in configs]
    known, usual = find_family(architectures, model_types), table().usual
    family = known or usual
    # Transformers may write a number under another name than vLLM reads it by
    experts, topk, hidden = ((*getattr(family, name), *getattr(usual, name)) for name in ("experts", "topk", "hidden"))
    text = next((config for config in configs if _number(config, experts)[0] > 1), None)
    if text is None:
        raise UnsupportedError(
            f"a model with experts: more than one by {_names(experts)}, there or in {_names(NESTED_KEYS)}",
            "none" + (f" in a config of model_type {shown(values['model_type'])}" if "model_type" in values else ""),
            "Name the config.json of a mixture-of-experts model; models without experts exchange no tokens.",
        )
    (num_experts, _), (num_per_token, field) = _number(text, experts), _required(text, topk)
    most, why = min((num_experts, "the number of experts"), (MAX_TOPK, "the most that an op takes"))
    if num_per_token > most:
        raise ConfigError(f"<= {most}, {why}", str(num_per_token), REMEDY, field=repr(field))
    quantization = (found(config, key, dict, CONFIG_FILE) for config in configs for key in QUANTIZATION_KEYS)
    layers = range(_number(text, (DENSE_LAYERS_KEY,))[0], _number(text, LAYER_KEYS)[0] or MAX_LAYERS)
    expert_dtype = family.expert_dtype and (found(values, EXPERT_DTYPE_KEY, str, CONFIG_FILE) or family.expert_dtype)
    return MoeModel(
        found(text, "model_type", str, CONFIG_FILE) or model_types[0],
        _required(text, hidden)[0],
        num_experts,
        num_per_token,
        _dtype([values, text]),
        read_quantization(next(filter(None, quantization), {}), layers, expert_dtype),
        family.shares_tokens,
        is_known=known is not None,
    )


def _without_mistrals_names(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values of Mistral's params.json by the names that vLLM gives them; others as they are."""
    if "dim" not in values or values.get("moe") is None:
        return values
    moe, quantization = (found(values, key, dict, MISTRAL_FILE) for key in ("moe", "quantization"))
    if "qformat_weight" in quantization:
        scheme = "dynamic" if found(quantization, "qscheme_act", str, MISTRAL_FILE) == "NO_SCALES" else "static"
        quantization = {"quant_method": "fp8", "activation_scheme": scheme}
    num_shared, hidden = found(moe, "num_shared_experts", int, MISTRAL_FILE), found(values, "dim", int, MISTRAL_FILE)
    architecture = "MistralLarge3ForCausalLM" if num_shared else "MixtralForCausalLM"
    names = {"architectures": [architecture], "hidden_size": hidden, QUANTIZATION_KEYS[0]: quantization}
    return {**values, **moe, **names}


def _with_nested(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a config and those of the language models in it, outer ones first."""
    configs = [values]
    for config in configs:
        configs += [nested for key in NESTED_KEYS if (nested := found(config, key, dict, CONFIG_FILE))]
    return configs


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[int, str]:
    """Returns the first number above 0 by the keys and its key, else 0; of a number per layer or block the largest.

    Raises:
        ConfigError: a value is neither a whole number nor a list of them.
    """
    blocks = config.get(BLOCKS_KEY)
    for key in keys:
        for owners in ([config], blocks if isinstance(blocks, list) else []):
            largest = max((number for owner in owners for number in _numbers(owner, key)), default=0)
            if largest > 0:
                return largest, key
    return 0, ""


def _numbers(value: Any, key: str) -> list[int]:
    """Returns the whole numbers that a key leads to through nested objects."""
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    numbers = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    for each in numbers:
        if type(each) is not int or each > MAX_INTEGER:
            raise ConfigError(f"to be a whole number, at most {MAX_INTEGER}", shown(each), REMEDY, field=repr(key))
    return numbers


def _required(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[int, str]:
    number, key = _number(config, keys)
    if not number:
        raise ConfigError(f"a number above 0 by {_names(keys)} beside the number of experts", "none", REMEDY)
    return number, key


def _dtype(configs: list[Mapping[str, Any]]) -> torch.dtype:
    """Returns vLLM's `--dtype auto`: float32 models, and those without a dtype, have bfloat16 activations."""
    named = ((found(config, key, str, CONFIG_FILE), key) for config in configs for key in DTYPE_KEYS)
    name, key = next((each for each in named if each[0]), ("bfloat16", ""))
    dtype = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"a dtype's name by {key} in {CONFIG_FILE}", shown(name), REMEDY)
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _names(keys: tuple[str, ...]) -> str:
    return ", ".join(map(repr, dict.fromkeys(keys)))
