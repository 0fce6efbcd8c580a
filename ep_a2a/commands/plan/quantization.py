"""Reads how vLLM quantises the experts of a model: as all of it, by layer, or left out by a list of modules."""

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from ep_a2a.config import FP8_DTYPE
from ep_a2a.errors import ConfigError, shown

T = TypeVar("T")
KINDS: dict[type, str] = {str: "text", int: "a whole number", dict: "a JSON object", list: "a list of text"}
"""What `found` reads, as errors call it."""
REMEDY = "Correct the model's config.json."
PLACE = "quantization_config"
FP8_BITS = 8
FP4_EXPERTS = "fp4"
"""A family's `expert_dtype` of experts in MXFP4, or in the format that `moe_quant_algo` names."""
LEFT_OUT_KEYS = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")
"""Keys of lists of modules that are not quantised."""
BLOCK_FP8_ALGORITHMS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
"""ModelOpt's names, in models of several algorithms, for what vLLM serves as fp8 with blocks of weights."""
EXPERT_LAYERS = re.compile(r"\.experts(\.|$)|\.moe\.(gate|up|down)_proj")
ROOTS = ("model.", "language_model.model.", "model.language_model.", "backbone.")
BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "moe", "ffn", "mixer")
"""Names of a MoE layer's experts are root, "layers.N.", block, ".experts"."""


class Quantization(NamedTuple):
    """How the experts of a model are quantised.

    Attributes:
        name: of the method, "none" where there is none.
        weights: "MXFP8", "MXFP4" or "FP4", of experts whose rows may travel in two ways; else "".
        activations: the part of vLLM's FusedMoEQuantConfig that decides how tokens travel, for experts that take
            quantised rows; None where they are not cast.
    """

    name: str
    weights: str
    activations: SimpleNamespace | None


def read_quantization(values: Mapping[str, Any], layers: range, expert_dtype: str | None) -> Quantization:
    """Returns the experts' quantisation.

    Args:
        values: of quantization_config, or of ModelOpt's hf_quant_config.json; empty where there is none.
        layers: numbers of the layers that may have experts.
        expert_dtype: the experts' own, in families whose experts may have another than the other layers; else None.

    Raises:
        ConfigError: a value is of another type than vLLM reads.
    """
    values = _of_experts(values, layers)
    name = _method(values)
    has_fp4 = expert_dtype == FP4_EXPERTS
    weights = ("FP4" if found(values, "moe_quant_algo", str, PLACE) else "MXFP4") if has_fp4 else ""
    activations = None
    if _is_mxfp8(values):
        weights = "MXFP8"
    elif name == "fp8" and not has_fp4:
        is_static = found(values, "activation_scheme", str, PLACE) == "static"
        shape = _block_shape("weight_block_size", values.get("weight_block_size"))
        activations = _quant(block_shape=shape, is_static=is_static)
    elif name == "compressed-tensors" and not has_fp4:
        activations = _compressed_tensors_quant(values)
    return Quantization(name, weights, activations)


def _of_experts(values: Mapping[str, Any], layers: range) -> Mapping[str, Any]:
    """Returns what config.json would hold if the whole model had the experts' quantisation; {} where there is none."""
    if "quantization" in values:
        values = {"quant_method": "modelopt", **found(values, "quantization", dict, PLACE)}
    left_out = [entry for key in LEFT_OUT_KEYS for entry in found(values, key, list, PLACE)]
    is_modelopt = _is_mxfp8(values) or "quant_algo" in values
    if any(_means_experts(entry, layers, is_modelopt=is_modelopt) for entry in left_out):
        return {"quant_method": f"{_method(values)} without the experts"}
    if found(values, "store_dtype", str, PLACE) == "mxfp4":
        return {"quant_method": "mxfp4"}
    if _algorithm(values) != "MIXED_PRECISION":
        return values
    by_layer = found(values, "quantized_layers", dict, PLACE)
    if not by_layer:
        raise ConfigError(f"algorithms of layers by quantized_layers in {PLACE}", "none", REMEDY)
    own = [found(by_layer, name, dict, "quantized_layers") for name in by_layer if EXPERT_LAYERS.search(name)]
    # the op's memory serves the layer whose rows take most: one that is not cast
    layer: Mapping[str, Any] = min(own, key=lambda each: _algorithm(each) in BLOCK_FP8_ALGORITHMS, default={})
    if _algorithm(layer) not in BLOCK_FP8_ALGORITHMS:
        return {**values, "quant_algo": _algorithm(layer)} if layer else {}
    size = found({"group_size": 128, **layer}, "group_size", int, "quantized_layers")
    return {"quant_method": "fp8", "weight_block_size": [size, size]}


def found(values: Mapping[str, Any], key: str, kind: type[T], place: str) -> T:
    """Returns the value by a key, of one of KINDS; an empty one, or 0, where there is none."""
    value: T | None = values.get(key)
    if value is None:
        return kind()
    if type(value) is not kind or (isinstance(value, list) and any(type(each) is not str for each in value)):
        raise ConfigError(f"{KINDS[kind]} by {key} in {place}", shown(value), REMEDY)
    return value


def _method(values: Mapping[str, Any]) -> str:
    name = (found(values, "quant_method", str, PLACE) or "none").lower().replace("_", "-")
    return name.encode(errors="replace").decode()


def _is_mxfp8(values: Mapping[str, Any]) -> bool:
    """Whether weights are MXFP8, as ModelOpt or a checkpoint of vLLM's short name says."""
    return _method(values) == "mxfp8" or "MXFP8" in _algorithm(values)


def _algorithm(values: Mapping[str, Any]) -> str:
    return found(values, "quant_algo", str, PLACE).upper()


def _means_experts(entry: str, layers: range, *, is_modelopt: bool) -> bool:
    """Whether an entry of a list of modules that are not quantised means experts of any layer, as vLLM reads it."""
    # the last layer stands for all that the entry does not name
    named = {*layers[-1:], *(int(number) for number in re.findall("[0-9]{1,9}", entry) if int(number) in layers)}
    modules = [f"{root}layers.{layer}.{block}.experts" for root in ROOTS for layer in named for block in BLOCKS]
    if entry.startswith("re:"):
        try:
            pattern = re.compile(entry[3:])
        except re.error as error:
            raise ConfigError(f"a pattern behind re: in {PLACE}", f"{shown(entry)}: {error}", REMEDY) from error
        return any(pattern.match(f"{module}.0.down_proj") for module in modules)
    if is_modelopt:
        return any(entry in module or module in entry or fnmatch(module, entry) for module in modules)
    return "experts" in entry and any(module in entry for module in modules)


def _compressed_tensors_quant(quantization: Mapping[str, Any]) -> SimpleNamespace | None:
    by_name = found(quantization, "config_groups", dict, PLACE)
    groups = [found(by_name, name, dict, "config_groups") for name in by_name]
    place = "a group of config_groups"
    for_experts = [each for each in groups if any("expert" in name for name in found(each, "targets", list, place))]
    group: Mapping[str, Any] = next(iter(for_experts or groups), {})
    inputs, weights = (found(group, name, dict, place) for name in ("input_activations", "weights"))
    if found(inputs, "type", str, place) != "float" or found(inputs, "num_bits", int, place) != FP8_BITS:
        return None
    block = weights.get("block_structure") if found(weights, "strategy", str, place) == "block" else None
    if isinstance(block, str):
        # _block_shape refuses what is no number
        block = [int(size) if re.fullmatch(" *[0-9]{1,9} *", size) else size for size in block.split("x")]
    shape = _block_shape("block_structure", block)
    by_token = shape is None and found(inputs, "strategy", str, place) == "token"
    return _quant(block_shape=shape, by_token=by_token, is_static=not inputs.get("dynamic"))


def _block_shape(key: str, sizes: Any) -> list[int] | None:
    """Returns rows and columns of a block of weights with one scale; None where there are no blocks."""
    if sizes is None:
        return None
    are_sizes = isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)
    if not are_sizes or len(sizes) != 2:
        raise ConfigError(f"two whole numbers above 0 by {key} in {PLACE}", shown(sizes), REMEDY)
    shape: list[int] = sizes
    return shape


def _quant(*, block_shape: list[int] | None, by_token: bool = False, is_static: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        quant_dtype=FP8_DTYPE,
        block_shape=block_shape,
        per_act_token_quant=by_token,
        a1_scale="static" if is_static else None,
        a1_gscale=None,
    )
