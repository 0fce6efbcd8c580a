"""AITER's expert parallelism on this package's kernels: `compat.install("aiter")` and then `import aiter`.

It has AITER's groups, communicators, managers and casts of tokens to fp8. AITER's kernels (fused_moe, ...) are not
here.
"""

import logging

from ep_a2a.compat.aiter import dtypes
from ep_a2a.compat.aiter.parallel_state import destroy_dist_env, init_dist_env
from ep_a2a.compat.aiter.quantization import QuantType, get_hip_quant

__all__ = ["QuantType", "destroy_dist_env", "dtypes", "get_hip_quant", "init_dist_env", "logger"]

logger = logging.getLogger("aiter")
