"""Folders of models in sizes that GPUs deserve: families of cpu/models.py, and the shapes of real models.

`save_model` writes weights with which the experts decide the tokens, `save_config` a shape for load_format="dummy".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.engines.vllm.cpu.models import CONFIGS, weights_of

if TYPE_CHECKING:
    from pathlib import Path

    import torch

FP8_BLOCK = 128
COMMON: dict[str, Any] = {"torch_dtype": "bfloat16", "hidden_size": 2048}
YARN = CONFIGS["deepseek_v2"]["rope_scaling"]
# FlashAttention 3 has kernels for these head sizes of MLA only
MLA: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

SHAPES: dict[str, dict[str, Any]] = {
    # four layers: what engines of two backends are compared with
    "qwen3_moe": CONFIGS["qwen3_moe"]
    | COMMON
    | {
        "intermediate_size": 4096,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 8192,
    },
    "deepseek_v2": CONFIGS["deepseek_v2"]
    | COMMON
    | MLA
    | {
        "intermediate_size": 4096,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "vocab_size": 4096,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "max_position_embeddings": 8192,
        "rope_scaling": YARN | {"original_max_position_embeddings": 2048},
    },
    # Qwen/Qwen3-30B-A3B
    "qwen3_30b": CONFIGS["qwen3_moe"]
    | COMMON
    | {
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek_v2_lite": CONFIGS["deepseek_v2"]
    | COMMON
    | MLA
    | {
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "vocab_size": 102400,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "max_position_embeddings": 163840,
        "rope_scaling": YARN | {"factor": 40, "original_max_position_embeddings": 4096},
    },
}


def save_config(folder: Path, config: dict[str, Any]) -> Path:
    """Writes config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantized(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose linear layers, but for gates and the last one, are in fp8 with a scale per block."""
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(config["num_hidden_layers"])]
    return config | {
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": ["lm_head", *gates],
        }
    }


def save_model(folder: Path, config: dict[str, Any], expert_gain: float = 2.0) -> Path:
    """Writes config.json and model.safetensors: one of tests.engines.vllm.cpu.models' kind, as the config wants it."""
    import torch
    from safetensors.torch import save_file

    save_config(folder, config)
    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape, gain in weights_of(config):
        gain = expert_gain if ".experts." in name else gain
        drawn = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator)
        weight = drawn if len(shape) == 1 else drawn.mul_(gain / shape[-1] ** 0.5)
        if "quantization_config" in config and name.endswith("proj.weight"):
            tensors[name], tensors[name + "_scale_inv"] = in_blocks(weight)
        else:
            tensors[name] = weight.to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as fp8, and the float32 scales of its blocks; FP8_BLOCK divides both sizes."""
    import torch

    rows, columns = (size // FP8_BLOCK for size in weight.shape)
    blocks = weight.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn), scales
