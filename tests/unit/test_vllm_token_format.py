"""How tokens travel for each kind of vLLM's FusedMoEQuantConfig, with stand-ins for it."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ep_a2a.config import FP8_DTYPE
from ep_a2a.integrations.token_format import RAW, LayerShape, TokenFormat, tokens_per_rank
from ep_a2a.integrations.vllm.token_format import token_format_of

HIDDEN = 7168
SCALE = torch.ones(1)


@dataclass(frozen=True)
class QuantConfig:
    """What vLLM's config has in all supported versions; `quant_dtype` and so on are those of the activations."""

    quant_dtype: torch.dtype | str | None = None
    per_act_token_quant: bool = False
    block_shape: list[int] | None = None
    a1_scale: torch.Tensor | None = None
    a1_gscale: torch.Tensor | None = None


@dataclass(frozen=True)
class TransposableConfig(QuantConfig):
    """From vLLM 0.33."""

    is_scale_transposed: bool = False


@dataclass(frozen=True)
class MxConfig(QuantConfig):
    """From vLLM 0.27."""

    is_scale_swizzled: bool = False
    mx_alignment: int = 0


PER_TOKEN = QuantConfig(FP8_DTYPE, per_act_token_quant=True)
PER_BLOCK = QuantConfig(FP8_DTYPE, block_shape=[128, 128])
AFTER = TokenFormat("none", quantize_after=True)
AFTER_BY_WHOLE_TENSOR = TokenFormat("none", quantize_after=True, by_whole_tensor=True)


def format_of(config: Any, hidden: int = HIDDEN, *, deferred: bool = False, powers_of_two: bool = False) -> TokenFormat:
    return token_format_of(config, hidden, expects_unquantized=deferred, powers_of_two=powers_of_two)


PER_1X128 = TokenFormat("fp8_per_1x128")
FORMATS: list[tuple[Any, TokenFormat]] = [
    # unquantised activations travel as they are
    (None, RAW),
    (QuantConfig(), RAW),
    (QuantConfig(block_shape=[128, 128]), RAW),
    # fp8 is cast inside dispatch; a block of the weights may be of any number of rows
    (PER_TOKEN, TokenFormat("fp8_per_token")),
    (PER_BLOCK, PER_1X128),
    (TransposableConfig(FP8_DTYPE, block_shape=[128, 128]), PER_1X128),
    (QuantConfig(FP8_DTYPE, block_shape=[1, 128]), PER_1X128),
    # blocks that dispatch cannot cast, static scales and other formats are quantised on arrival
    (QuantConfig(FP8_DTYPE, block_shape=[64, 64]), AFTER),
    (QuantConfig(FP8_DTYPE, block_shape=[128, 64]), AFTER),
    (TransposableConfig(FP8_DTYPE, block_shape=[128, 128], is_scale_transposed=True), AFTER),
    (QuantConfig(FP8_DTYPE, block_shape=[128, 128], a1_scale=SCALE), AFTER),
    (QuantConfig(FP8_DTYPE, a1_scale=SCALE), AFTER),
    (QuantConfig(FP8_DTYPE, per_act_token_quant=True, a1_scale=SCALE), AFTER),
    (QuantConfig(torch.int8, per_act_token_quant=True), AFTER),
    (QuantConfig(torch.int8, block_shape=[128, 128]), AFTER),
    (QuantConfig(torch.int8, a1_scale=SCALE), AFTER),
    (QuantConfig("nvfp4", a1_gscale=SCALE), AFTER),
    (MxConfig("mxfp8", block_shape=[1, 32]), TokenFormat("mxfp8")),
    (MxConfig("mxfp8", mx_alignment=256), TokenFormat("mxfp8")),
    (MxConfig("mxfp8", mx_alignment=1 << 20), AFTER),
    (MxConfig("mxfp8", is_scale_swizzled=True), AFTER),
    (QuantConfig("mxfp8"), AFTER),
    (QuantConfig("mxfp4"), AFTER),
    (QuantConfig("fp8", a1_scale=SCALE), AFTER),
    # one scale for all rows must not see rows without a token
    (QuantConfig(FP8_DTYPE), AFTER_BY_WHOLE_TENSOR),
    (QuantConfig(torch.int8), AFTER_BY_WHOLE_TENSOR),
]


@pytest.mark.parametrize(("config", "expected"), FORMATS)
def test_how_tokens_travel(config, expected):
    assert format_of(config) == expected
    assert expected.dtype == (None if expected.cast == "none" else FP8_DTYPE)
    # experts that quantise themselves get tokens as they are
    assert format_of(config, deferred=True) == RAW


@pytest.mark.parametrize(("config", "is_told"), [(PER_BLOCK, True), (PER_TOKEN, False), (QuantConfig("nvfp4"), False)])
def test_experts_that_double_the_bytes_are_said(config, is_told):
    assert ("--moe-backend deep_gemm" in format_of(config, deferred=True).advice) == is_told
    assert not format_of(config).advice


def test_hidden_sizes():
    assert format_of(PER_TOKEN, 2880).cast == "fp8_per_token"
    assert format_of(PER_BLOCK, 2880) == AFTER


def test_block_scales_are_rounded_where_vllm_rounds_them():
    assert format_of(PER_BLOCK, powers_of_two=True) == TokenFormat("fp8_per_1x128", "float32_power_of_two")
    assert format_of(PER_TOKEN, powers_of_two=True).scale_format == "float32"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_micro_batch_has_room_for_what_the_others_leave(number):
    """vLLM rounds down for all but the last one; ranks then share a micro-batch, and round up."""
    for most in range(1, 40):
        for sharing in (1, 2, 3, 8):
            shape = LayerShape(torch.bfloat16, HIDDEN, 8, 256, 32, tokens_per_rank(most, sharing))
            room = shape.of_micro_batch(number).max_tokens
            last = most // number + most % number
            assert tokens_per_rank(last, sharing) <= room <= tokens_per_rank(most, sharing) + number - 1
