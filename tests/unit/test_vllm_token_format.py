"""How tokens travel for each kind of vLLM's FusedMoEQuantConfig, with stand-ins for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ep_a2a.config import FP8_DTYPE
from ep_a2a.integrations.vllm.token_format import RAW, TokenFormat, token_format_of

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


PER_TOKEN = QuantConfig(FP8_DTYPE, per_act_token_quant=True)
PER_BLOCK = QuantConfig(FP8_DTYPE, block_shape=[128, 128])
AFTER = TokenFormat("none", quantize_after=True)
AFTER_BY_WHOLE_TENSOR = TokenFormat("none", quantize_after=True, by_whole_tensor=True)


def format_of(config: Any, hidden: int = HIDDEN, *, deferred: bool = False, powers_of_two: bool = False) -> TokenFormat:
    return token_format_of(config, hidden, expects_unquantized=deferred, powers_of_two=powers_of_two)


@pytest.mark.parametrize("config", [None, QuantConfig(), QuantConfig(block_shape=[128, 128])])
def test_unquantised_activations_travel_as_they_are(config):
    assert format_of(config) == RAW
    assert RAW.dtype is None


@pytest.mark.parametrize(
    "config",
    [PER_TOKEN, PER_BLOCK, QuantConfig(FP8_DTYPE), QuantConfig("nvfp4", a1_gscale=SCALE), QuantConfig("mxfp8")],
)
def test_experts_that_quantise_themselves_get_tokens_as_they_are(config):
    assert format_of(config, deferred=True) == RAW


@pytest.mark.parametrize("powers_of_two", [False, True])
def test_fp8_per_token_is_cast_inside_dispatch(powers_of_two):
    """vLLM rounds block scales only to powers of two."""
    found = format_of(PER_TOKEN, powers_of_two=powers_of_two)
    assert found == TokenFormat("fp8_per_token")
    assert found.scale_format == "float32"
    assert found.dtype == FP8_DTYPE


def test_fp8_per_token_takes_any_hidden_size():
    assert format_of(PER_TOKEN, 2880).cast == "fp8_per_token"


def test_fp8_per_block_is_cast_inside_dispatch():
    assert format_of(PER_BLOCK) == TokenFormat("fp8_per_1x128")
    assert format_of(PER_BLOCK).dtype == FP8_DTYPE


def test_block_scales_are_rounded_where_vllm_rounds_them():
    assert format_of(PER_BLOCK, powers_of_two=True) == TokenFormat("fp8_per_1x128", "float32_power_of_two")


@pytest.mark.parametrize("config", [TransposableConfig(FP8_DTYPE, block_shape=[128, 128]), PER_BLOCK])
def test_a_version_with_transposed_scales_casts_the_same_when_they_are_not(config):
    assert format_of(config).cast == "fp8_per_1x128"


@pytest.mark.parametrize(
    ("config", "hidden"),
    [
        (PER_BLOCK, 2880),
        (QuantConfig(FP8_DTYPE, block_shape=[64, 64]), HIDDEN),
        (QuantConfig(FP8_DTYPE, block_shape=[128, 64]), HIDDEN),
        (TransposableConfig(FP8_DTYPE, block_shape=[128, 128], is_scale_transposed=True), HIDDEN),
        (QuantConfig(FP8_DTYPE, block_shape=[128, 128], a1_scale=SCALE), HIDDEN),
    ],
)
def test_blocks_that_dispatch_cannot_cast_are_quantised_on_arrival(config, hidden):
    found = format_of(config, hidden)
    assert found == AFTER
    assert found.dtype is None


def test_rows_of_a_block_count_and_not_its_columns():
    """Activations have one scale per row and block, however many rows of the weights share one."""
    assert format_of(QuantConfig(FP8_DTYPE, block_shape=[1, 128])).cast == "fp8_per_1x128"


@pytest.mark.parametrize("per_token", [False, True])
def test_static_scales_are_applied_on_arrival(per_token):
    config = QuantConfig(FP8_DTYPE, per_act_token_quant=per_token, a1_scale=SCALE)
    assert format_of(config) == AFTER


@pytest.mark.parametrize("dtype", [FP8_DTYPE, torch.int8])
def test_one_scale_for_all_rows_must_not_see_rows_without_a_token(dtype):
    assert format_of(QuantConfig(dtype)) == AFTER_BY_WHOLE_TENSOR


@pytest.mark.parametrize(
    "config",
    [
        QuantConfig(torch.int8, per_act_token_quant=True),
        QuantConfig(torch.int8, block_shape=[128, 128]),
        QuantConfig(torch.int8, a1_scale=SCALE),
        QuantConfig("nvfp4", a1_gscale=SCALE),
        QuantConfig("mxfp8"),
        QuantConfig("mxfp4"),
        QuantConfig("fp8", a1_scale=SCALE),
    ],
)
def test_other_formats_are_quantised_on_arrival(config):
    assert format_of(config) == AFTER


def test_a_format_is_one_or_the_other():
    """A cast inside dispatch and one on arrival would quantise twice."""
    configs = [None, QuantConfig(), PER_TOKEN, PER_BLOCK, QuantConfig(FP8_DTYPE), QuantConfig("nvfp4")]
    for found in (format_of(config, deferred=deferred) for config in configs for deferred in (False, True)):
        assert found.cast == "none" or not found.quantize_after
        assert found.quantize_after or not found.by_whole_tensor
