"""Models as Hugging Face folders without a tokenizer: tiny ones of two families, and shapes for GPUs.

vLLM's dummy weights are so small that the experts hardly matter. With those of `save_model` the experts decide which
token comes next; `save_config` writes a shape for load_format="dummy".
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMON: dict[str, Any] = {
    "torch_dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_experts_per_tok": 2,
}
QWEN3_MOE: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": None,
    "router_aux_loss_coef": 0.0,
}
# vLLM's attention kernel for CPUs takes these two large sizes only, and is right with yarn scaling only, which the real
# models have.
DEEPSEEK_V2: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
CONFIGS = {"qwen3_moe": QWEN3_MOE, "deepseek_v2": DEEPSEEK_V2}

FP8_BLOCK = 128
ON_GPUS: dict[str, Any] = {"torch_dtype": "bfloat16", "hidden_size": 2048}
YARN = DEEPSEEK_V2["rope_scaling"]
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
    "qwen3_moe": QWEN3_MOE
    | ON_GPUS
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
    "deepseek_v2": DEEPSEEK_V2
    | ON_GPUS
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
    "qwen3_30b": QWEN3_MOE
    | ON_GPUS
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
    "deepseek_v2_lite": DEEPSEEK_V2
    | ON_GPUS
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

Weight = tuple[str, tuple[int, ...], float]
"""Name, shape, and gain: the standard deviation is gain / sqrt(inputs). A gain of 0 is a norm's ones."""


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
    """Writes config.json and model.safetensors. With expert_gain 0 the routed experts give zeros."""
    from safetensors.torch import save_file

    save_config(folder, config)
    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape, gain in weights_of(config):
        gain = expert_gain if ".experts." in name else gain
        if len(shape) == 1:
            weight = torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator).mul_(gain / shape[-1] ** 0.5)
        if "quantization_config" in config and name.endswith("proj.weight"):
            tensors[name], tensors[name + "_scale_inv"] = in_blocks(weight)
        else:
            tensors[name] = weight.to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as fp8, and the float32 scales of its blocks; FP8_BLOCK divides both sizes."""
    rows, columns = (size // FP8_BLOCK for size in weight.shape)
    blocks = weight.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scales[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn), scales


def weights_of(config: dict[str, Any]) -> Iterator[Weight]:
    hidden = config["hidden_size"]
    # embeddings of unit variance
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), hidden**0.5
    yield "model.norm.weight", (hidden,), 0
    yield "lm_head.weight", (config["vocab_size"], hidden), 1
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,), 0
        yield prefix + "post_attention_layernorm.weight", (hidden,), 0
        attention = _qwen_attention if config["model_type"] == "qwen3_moe" else _deepseek_attention
        yield from attention(config, prefix + "self_attn.")
        yield from _feed_forward(config, prefix + "mlp.", layer)


def _qwen_attention(config: dict[str, Any], prefix: str) -> Iterator[Weight]:
    hidden, size = config["hidden_size"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield prefix + "q_proj.weight", (heads, hidden), 1
    yield prefix + "k_proj.weight", (key_heads, hidden), 1
    yield prefix + "v_proj.weight", (key_heads, hidden), 1
    yield prefix + "o_proj.weight", (hidden, heads), 1
    yield prefix + "q_norm.weight", (size,), 0
    yield prefix + "k_norm.weight", (size,), 0


def _deepseek_attention(config: dict[str, Any], prefix: str) -> Iterator[Weight]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield prefix + "q_proj.weight", (heads * (nope + rope), hidden), 1
    yield prefix + "kv_a_proj_with_mqa.weight", (rank + rope, hidden), 1
    yield prefix + "kv_a_layernorm.weight", (rank,), 0
    yield prefix + "kv_b_proj.weight", (heads * (nope + value), rank), 1
    yield prefix + "o_proj.weight", (hidden, heads * value), 1


def _feed_forward(config: dict[str, Any], prefix: str, layer: int) -> Iterator[Weight]:
    if layer < config.get("first_k_dense_replace", 0):
        yield from _mlp(config, prefix, config["intermediate_size"])
        return
    size, num_experts = config["moe_intermediate_size"], config.get("num_experts") or config["n_routed_experts"]
    yield prefix + "gate.weight", (num_experts, config["hidden_size"]), 2
    for expert in range(num_experts):
        yield from _mlp(config, f"{prefix}experts.{expert}.", size)
    if config.get("n_shared_experts"):
        yield from _mlp(config, prefix + "shared_experts.", size * config["n_shared_experts"])


def _mlp(config: dict[str, Any], prefix: str, size: int) -> Iterator[Weight]:
    hidden = config["hidden_size"]
    yield prefix + "gate_proj.weight", (size, hidden), 1
    yield prefix + "up_proj.weight", (size, hidden), 1
    yield prefix + "down_proj.weight", (hidden, size), 1
