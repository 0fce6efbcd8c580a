"""How the tokens of a MoE layer travel, by vLLM's quantisation config; knows nothing of vLLM's modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ep_a2a.config import FP8_DTYPE, FP8_GROUP_SIZE

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WireFormat:
    """What happens to tokens before and after they travel.

    Attributes:
        cast: quant_type of the op: which fp8 cast happens inside dispatch; "none" sends the rows as they are.
        scale_format: of that cast's scales.
        quantize_after: received rows are quantised by vLLM's own helper, because the cast is none of ours.
        by_whole_tensor: that helper takes one scale from all rows, so rows without a token must be zeros.
    """

    cast: str
    scale_format: str = "float32"
    quantize_after: bool = False
    by_whole_tensor: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the received rows, where dispatch changes it."""
        return None if self.cast == "none" else FP8_DTYPE


RAW = WireFormat("none")


def wire_format(quant_config: Any, hidden_dim: int, *, expects_unquantized: bool, powers_of_two: bool) -> WireFormat:
    """The wire format for experts with this FusedMoEQuantConfig (None: unquantised).

    Args:
        hidden_dim: elements of a row.
        expects_unquantized: the experts quantise themselves (vLLM's defer_input_quant).
        powers_of_two: vLLM's block quantisation rounds scales up to powers of two on this GPU.
    """
    if quant_config is None or quant_config.quant_dtype is None or expects_unquantized:
        return RAW
    emulated = getattr(quant_config, "quantization_emulation", False)
    transposed = getattr(quant_config, "is_scale_transposed", False)
    if quant_config.quant_dtype == FP8_DTYPE and not emulated and quant_config.a1_scale is None:
        block = quant_config.block_shape
        if block is None and quant_config.per_act_token_quant:
            return WireFormat("fp8_per_token")
        fits = block is not None and block[1] == FP8_GROUP_SIZE and hidden_dim % FP8_GROUP_SIZE == 0
        if fits and not transposed:
            return WireFormat("fp8_per_1x128", "float32_power_of_two" if powers_of_two else "float32")
    per_row = quant_config.per_act_token_quant or quant_config.block_shape is not None
    has_scale = quant_config.a1_scale is not None or quant_config.a1_gscale is not None
    grouped = isinstance(quant_config.quant_dtype, str)  # "nvfp4", "mxfp8", ...: a scale per group of a row
    return WireFormat("none", quantize_after=True, by_whole_tensor=not (per_row or has_scale or grouped))
