"""Stand-in arguments of calls: one for each form of a call for which an op compiles kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ep_a2a.config import FP8_DTYPE, CompiledCalls, Layout
from ep_a2a.ops.arguments import CombineArguments, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.config import EpDispatchCombineConfig

NUM_ELEMENTS = 16


def warmup_dispatches(config: EpDispatchCombineConfig, device: torch.device) -> Iterator[Step]:
    """Arguments of a dispatch of each form, with step_tokens 1."""
    word = torch.empty(NUM_ELEMENTS, dtype=torch.int32, device=device)
    floats = torch.empty(NUM_ELEMENTS, dtype=torch.float32, device=device)
    only_serving = config.compiled_calls == CompiledCalls.SERVING
    # in layout expert_major weights always travel
    sent_weights = (floats,) if only_serving or config.layout == Layout.EXPERT_MAJOR else (None, floats)
    inputs = [torch.empty(NUM_ELEMENTS, dtype=config.data_type, device=device)]
    if config.casts_in_dispatch and not only_serving:
        inputs.append(torch.empty(NUM_ELEMENTS, dtype=FP8_DTYPE, device=device))
    scale_options: list[torch.Tensor | None] = [None, word] if config.num_scales else [None]
    if only_serving:
        scale_options = scale_options[-1:]
    for x in inputs:
        casts = config.casts_in_dispatch and x.dtype != FP8_DTYPE
        for scales in [word if config.takes_scale else None] if casts else scale_options:
            for weights in sent_weights:
                yield Step(x, weights, scales, word, step_tokens=1)


def warmup_combines(config: EpDispatchCombineConfig, device: torch.device) -> Iterator[CombineArguments]:
    """Arguments of a combine of each form, with step_tokens 1."""
    only_serving = config.compiled_calls == CompiledCalls.SERVING
    rows = torch.empty(NUM_ELEMENTS, dtype=config.combined_dtype, device=device)
    word = torch.empty(NUM_ELEMENTS, dtype=torch.int32, device=device)
    floats = torch.empty(NUM_ELEMENTS, dtype=torch.float32, device=device)
    # in layout expert_major weights never come back
    for weights in (None,) if only_serving or config.layout == Layout.EXPERT_MAJOR else (None, floats):
        for ids in (None,) if only_serving else (None, word):
            yield CombineArguments(rows, weights, ids, rows)
