"""AITER's casts of tokens to fp8, in plain torch."""

import enum
from collections.abc import Callable

import torch

from ep_a2a.config import FP8_DTYPE
from ep_a2a.errors import UnsupportedError
from ep_a2a.quantization import quantize_per_1x128, quantize_per_token


class QuantType(enum.IntEnum):
    """AITER's kinds of quantisation, of tokens and of weights. Numbers are AITER's."""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5


_CASTS = {QuantType.per_Token: quantize_per_token, QuantType.per_1x128: quantize_per_1x128}


def get_hip_quant(qType: QuantType) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Returns the function that quantises tokens [T, H] so: `(tokens, scale=None, quant_dtype=dtypes.fp8)`.

    Its result is (fp8 [T, H], float32 scales [T, 1] or [T, H / 128]); for QuantType.No (the tokens, None).

    Raises:
        UnsupportedError: another kind than No, per_Token and per_1x128; the function, of given scales and other dtypes.
    """
    if qType != QuantType.No and qType not in _CASTS:
        raise UnsupportedError(
            "QuantType.No, per_Token or per_1x128 for tokens",
            str(qType),
            "Quantise tokens per_1x128 for weights per_128x128; cast to other formats yourself.",
        )

    def quantise(
        x: torch.Tensor, scale: torch.Tensor | None = None, quant_dtype: torch.dtype = FP8_DTYPE
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if qType == QuantType.No:
            return x, None
        if scale is not None or quant_dtype != FP8_DTYPE:
            raise UnsupportedError(
                "quant_dtype float8_e4m3fn without a given scale",
                f"{quant_dtype}, {'no scale' if scale is None else 'a scale'}",
                "Pass quant_dtype=dtypes.fp8 and no scale.",
            )
        return _CASTS[qType](x)

    return quantise
