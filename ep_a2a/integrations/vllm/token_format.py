"""The token format that vLLM's experts ask for. Imports nothing of vLLM."""

from dataclasses import replace
from typing import Any

from ep_a2a.config import FP8_DTYPE, FP8_GROUP_SIZE, MX_GROUP_SIZE
from ep_a2a.integrations.token_format import RAW, TokenFormat

TWICE_THE_BYTES = "the experts that vLLM chose cast rows themselves: --moe-backend deep_gemm halves the bytes"


def token_format_of(
    quant_config: Any, hidden_dim: int, *, expects_unquantized: bool, powers_of_two: bool
) -> TokenFormat:
    """Returns the token format for experts with this FusedMoEQuantConfig.

    Args:
        quant_config: vLLM's; None is unquantised.
        hidden_dim: elements of a row.
        expects_unquantized: the experts quantise themselves (vLLM's defer_input_quant).
        powers_of_two: vLLM's block quantisation rounds scales up to powers of two on this GPU.
    """
    if quant_config is None or quant_config.quant_dtype is None:
        return RAW
    if expects_unquantized:
        other = token_format_of(quant_config, hidden_dim, expects_unquantized=False, powers_of_two=powers_of_two)
        return replace(RAW, advice=TWICE_THE_BYTES if other.cast == "fp8_per_1x128" else "")
    transposed = getattr(quant_config, "is_scale_transposed", False)
    if quant_config.quant_dtype == FP8_DTYPE and quant_config.a1_scale is None:
        block = quant_config.block_shape
        if block is None and quant_config.per_act_token_quant:
            return TokenFormat("fp8_per_token")
        fits = block is not None and block[1] == FP8_GROUP_SIZE and hidden_dim % FP8_GROUP_SIZE == 0
        if fits and not transposed:
            return TokenFormat("fp8_per_1x128", "float32_power_of_two" if powers_of_two else "float32")
    swizzled = getattr(quant_config, "is_scale_swizzled", True)
    # vLLM's function pads rows up to a multiple of this, and dispatch does not
    alignment = max(MX_GROUP_SIZE, getattr(quant_config, "mx_alignment", 0))
    if quant_config.quant_dtype == "mxfp8" and not swizzled and hidden_dim % alignment == 0:
        return TokenFormat("mxfp8")
    per_row = quant_config.per_act_token_quant or quant_config.block_shape is not None
    has_scale = quant_config.a1_scale is not None or quant_config.a1_gscale is not None
    grouped = isinstance(quant_config.quant_dtype, str)  # "nvfp4", "mxfp8", ...: a scale per group of a row
    return TokenFormat("none", quantize_after=True, by_whole_tensor=not (per_row or has_scale or grouped))
