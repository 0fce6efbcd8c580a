"""Models as Hugging Face folders without a tokenizer: tiny ones of two families, and shapes for GPUs.

vLLM's dummy weights are so small that the experts hardly matter. With those of `save_model` the experts decide which
token comes next; `save_config` writes a shape for load_format="dummy".
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def read_configs(folder: str) -> dict[str, dict[str, Any]]:
    """The config.json of each model of a folder, by the model's name."""
    paths = (Path(__file__).parent / "configs" / folder).glob("*.json")
    return {path.stem: json.loads(path.read_text()) for path in sorted(paths)}


CONFIGS = read_configs("tiny")
"""What a CPU runs.

vLLM's attention kernel for CPUs takes deepseek_v3's two large sizes of MLA only. It is right with yarn scaling only,
which the real models have.
"""
SHAPES = read_configs("on_gpus")
"""qwen3_moe and deepseek_v2 have four layers: what engines of two backends are compared with. The others are the shapes
of Qwen/Qwen3-30B-A3B and deepseek-ai/DeepSeek-V2-Lite.

FlashAttention 3 has kernels for deepseek_v2's head sizes of MLA only.
"""
QWEN3_MOE = CONFIGS["qwen3_moe"]
FP8_BLOCK = 128

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


def fill_dummy_weights(model: torch.nn.Module) -> None:
    """Gives vLLM's dummy weights that decide the routing a size at which tokens choose unlike experts.

    A gate of larger weights would give many experts the score 1.0, of which DeepSeek's gate takes the first ones.
    """
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.fill_(1)
        elif name.endswith("gate.weight"):
            weight.data.normal_(std=weight.shape[-1] ** -0.5)
        elif name.endswith("embed_tokens.weight"):
            weight.data.normal_()
        elif name.endswith("e_score_correction_bias"):
            weight.data.zero_()


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
