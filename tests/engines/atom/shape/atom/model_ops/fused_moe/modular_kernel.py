"""The shape of atom.model_ops.fused_moe.modular_kernel; see shape/README.md."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class FusedMoEActivationFormat(Enum):
    Standard = ("standard",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: Any
    expert_num_tokens_cpu: Any


class FusedMoEModularKernel:
    def __init__(self, prepare_finalize, quant_config=None):
        self.prepare_finalize = prepare_finalize
        self.quant_config = quant_config

    def _prepare(self, x, weights, ids, num_experts, expert_map, on_input, quant_type):
        """Whole calls, or where they are supported, halves: (what runs later, what then returns)."""
        if not self.prepare_finalize.supports_async():
            return None, lambda: self.prepare_finalize.prepare(
                x, weights, ids, num_experts, expert_map, on_input, self.quant_config, quant_type
            )
        return self.prepare_finalize.prepare_async(x, weights, ids, num_experts, expert_map, on_input)

    def _finalize(self, output, rows, weights, ids, on_input):
        """As `_prepare`."""
        if not self.prepare_finalize.supports_async():
            return None, lambda: self.prepare_finalize.finalize(output, rows, weights, ids, on_input)
        return self.prepare_finalize.finalize_async(output, rows, weights, ids, on_input)
