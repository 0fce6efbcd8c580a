"""AITER's short names of torch's dtypes. fp8 is e4m3fn, the only fp8 of this package's kernels."""

import torch

from ep_a2a.config import FP8_DTYPE

fp8 = FP8_DTYPE
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
i8, i16, i32, i64, u8 = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8
