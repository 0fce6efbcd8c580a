"""DeepEP's interface (`deep_ep`, V1) on this package's kernels: change the import, keep the calls (docs/deepep.md)."""

import torch

from ep_a2a.compat.deep_ep.buffer import Buffer
from ep_a2a.compat.deep_ep.utils import EventHandle, EventOverlap
from ep_a2a.compat.deep_ep_sizes import Config, LowLatencyLayout

topk_idx_t = torch.int64
"""DeepEP's dtype of expert ids; int32 works as well."""

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "LowLatencyLayout", "topk_idx_t"]
