"""The launches of an inter-node op around its hop between nodes, and the buffers that they fill and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from ep_a2a.config import FP8_DTYPE, CompiledCalls
from ep_a2a.kernels.compiled_kernel import TRITON_DTYPES, CompiledKernel
from ep_a2a.kernels.layout import WORD_BYTES, padded
from ep_a2a.kernels.staged_kernels import add_nodes_kernel, pack_kernel
from ep_a2a.memory.allocator_isolation import zeros_outside_pools
from ep_a2a.ops.arguments import NO_BIASES, Biases
from ep_a2a.ops.inputs import elements_of
from ep_a2a.ops.row_constants import MAX_BLOCK_WORDS, row_constants
from ep_a2a.tuning.policy import INTERPRETED_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.ops.staged_layout import RailField

PACK_WARPS = 8
ADD_WARPS = 4
ADD_ELEMENTS = 1024
ADDING_PROGRAMS_PER_SM = 4


def zeros(field: RailField, device: torch.device) -> torch.Tensor:
    """Zeros of any dtype that outlive an engine's memory pools."""
    return zeros_outside_pools(field.num_bytes, device).view(field.dtype).view(field.shape)


@dataclass(frozen=True)
class RailTokens:
    """What one direction of the hop carries: lines [N * M, ...], of which a step uses the first N * max_num_tokens.

    Line n * max_num_tokens + t goes to, or comes from, node n, and is that of token t at its source.

    Attributes:
        tokens: rows of wire_dtype [N * M, H].
        ids: int32 [N * M, K]; -1 in all slots of a line that is not used.
        weights: float32 [N * M, K].
        scales: [N * M, S], or None.
    """

    tokens: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None

    @classmethod
    def allocate(cls, lines: Sequence[RailField], device: torch.device) -> RailTokens:
        """Zeroed lines of a RailLayout."""
        tokens, ids, weights, *scales = (zeros(field, device) for field in lines)
        return cls(tokens, ids, weights, scales[0] if scales else None)

    def of_step(self, num_lines: int, *, has_weights: bool, has_scales: bool) -> list[torch.Tensor]:
        """The lines of a step that travel."""
        found = [self.tokens, self.ids]
        if has_weights:
            found.append(self.weights)
        if has_scales and self.scales is not None:
            found.append(self.scales)
        return [lines[:num_lines] for lines in found]

    @property
    def num_bytes(self) -> int:
        """Bytes of all lines."""
        tensors = (self.tokens, self.ids, self.weights, self.scales)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class RailKernels:
    """Compiles and launches what an inter-node op does on this rank alone.

    Args:
        config: of the whole group, W ranks.
        num_nodes: N; the ranks of a node follow one another.
        device: where the kernels run; CPU means Triton's interpreter.
    """

    def __init__(self, config: EpDispatchCombineConfig, num_nodes: int, device: torch.device) -> None:
        self.config, self.num_nodes, self.device = config, num_nodes, device
        is_gpu = device.type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 0
        self._packs: dict[tuple[bool, bool, bool], CompiledKernel] = {}
        self._adds: dict[tuple[bool, bool, bool], CompiledKernel] = {}

    def pack(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        weights: torch.Tensor | None,
        ids: torch.Tensor,
        lines: RailTokens,
        visits: torch.Tensor,
        max_num_tokens: int,
    ) -> None:
        """Launches what writes each token's line for every node that it visits, and which those are: int32 [T, N]."""
        variant, values = self._pack(x, scales, weights, ids, lines, visits, max_num_tokens)
        # programs without tokens mark lines that nobody fills
        variant.run(self._programs(max_num_tokens), values, self.device)

    def add_nodes(
        self,
        rows: torch.Tensor,
        weight_rows: torch.Tensor | None,
        visits: torch.Tensor,
        biases: Biases,
        result: torch.Tensor,
        result_weights: torch.Tensor,
        num_tokens: int,
        max_num_tokens: int,
    ) -> None:
        """Launches what adds nodes' sums [N * max_num_tokens, H] and biases into result [T, H], and their weights."""
        variant, values = self._add(
            rows, weight_rows, visits, biases, result, result_weights, num_tokens, max_num_tokens
        )
        num_blocks = -(-self.config.hidden_dim // variant.constants["BLOCK"])
        variant.run(self._programs(num_tokens * num_blocks, ADDING_PROGRAMS_PER_SM), values, self.device)

    def compile(self, lines: RailTokens, visits: torch.Tensor, result: torch.Tensor) -> None:
        """Compiles and loads, on a GPU, every form of these launches that the op's calls need; launches nothing."""
        if self.device.type != "cuda":
            return
        config, word = self.config, torch.empty(16, dtype=torch.int32, device=self.device)
        floats = torch.empty(16, dtype=torch.float32, device=self.device)
        only_serving = config.compiled_calls == CompiledCalls.SERVING
        inputs = [torch.empty(16, dtype=config.data_type, device=self.device)]
        if config.casts_in_dispatch and not only_serving:
            inputs.append(torch.empty(16, dtype=FP8_DTYPE, device=self.device))
        for x in inputs:
            given = config.num_scales and (not config.casts_in_dispatch or x.dtype == FP8_DTYPE)
            for scales in (None, word) if given else (None,):
                for weights in (floats,) if only_serving else (None, floats):
                    variant, values = self._pack(x, scales, weights, word, lines, visits, 1)
                    variant.compile(values)
        for weight_rows in (None,) if only_serving else (None, floats):
            variant, values = self._add(result, weight_rows, visits, NO_BIASES, result, floats, 0, 1)
            variant.compile(values)

    def _pack(
        self, x: torch.Tensor, scales: torch.Tensor | None, weights: torch.Tensor | None, ids: torch.Tensor,
        lines: RailTokens, visits: torch.Tensor, max_num_tokens: int,
    ) -> tuple[CompiledKernel, tuple[Any, ...]]:  # fmt: skip
        casts = self.config.casts_in_dispatch and x.dtype != FP8_DTYPE
        key = casts, scales is not None, weights is not None
        if key not in self._packs:
            self._packs[key] = CompiledKernel(pack_kernel, self._pack_constants(*key), PACK_WARPS)
        made_in_words = casts and self.config.scale_bytes == WORD_BYTES
        scale_dtype = torch.int32 if made_in_words or (not casts and self._scales_are_words) else torch.uint8
        values = (
            x if casts else elements_of(x, torch.int32),
            ids if scales is None else elements_of(scales, scale_dtype),
            ids if weights is None else weights.view(torch.int32),
            ids,
            lines.tokens.view(torch.uint8 if casts else torch.int32),
            ids if lines.scales is None else lines.scales.view(scale_dtype),
            lines.weights.view(torch.int32), lines.ids, visits, x.shape[0], max_num_tokens,
        )  # fmt: skip
        return self._packs[key], values

    def _add(
        self, rows: torch.Tensor, weight_rows: torch.Tensor | None, visits: torch.Tensor, biases: Biases,
        result: torch.Tensor, result_weights: torch.Tensor, num_tokens: int, max_num_tokens: int,
    ) -> tuple[CompiledKernel, tuple[Any, ...]]:  # fmt: skip
        has_weights = weight_rows is not None
        key = has_weights, biases[0] is not None, biases[1] is not None
        if key not in self._adds:
            self._adds[key] = CompiledKernel(add_nodes_kernel, self._add_constants(has_weights), ADD_WARPS)
        element = torch.int16 if rows.dtype.itemsize == 2 else torch.int32
        values = (
            rows.view(element), visits if weight_rows is None else weight_rows.view(torch.int32), visits, *biases,
            result, result_weights, num_tokens, max_num_tokens,
        )  # fmt: skip
        return self._adds[key], values

    def _programs(self, most: int, per_sm: int = 1) -> int:
        return max(1, min(most, self._num_sms * per_sm)) if self._num_sms else INTERPRETED_PROGRAMS

    @property
    def _scale_line_bytes(self) -> int:
        return self.config.num_scales * self.config.scale_bytes

    @property
    def _scales_are_words(self) -> bool:
        return self._scale_line_bytes % WORD_BYTES == 0

    def _pack_constants(self, casts: bool, has_scales: bool, has_weights: bool) -> dict[str, Any]:
        config, row = self.config, row_constants(self.config, casts=casts)
        width = self._scale_line_bytes if has_scales else 0
        width = width // WORD_BYTES if self._scales_are_words else width
        num_experts, num_ranks, _, _ = config.owners
        return {
            **row, "BLOCK_WORDS": min(padded(row["ROW_WORDS"]), MAX_BLOCK_WORDS),
            "TOPK": config.topk, "TOPK_LANES": padded(config.topk),
            "OWNERS": (num_experts, num_ranks, 0, config.world_size // self.num_nodes), "NUM_NODES": self.num_nodes,
            "SCALE_WIDTH": width, "SCALE_LANES": padded(max(1, width)), "HAS_WEIGHTS": has_weights,
        }  # fmt: skip

    def _add_constants(self, has_weights: bool) -> dict[str, Any]:
        config = self.config
        return {
            "HIDDEN": config.hidden_dim, "BLOCK": min(padded(config.hidden_dim), ADD_ELEMENTS),
            "TOPK": config.topk, "TOPK_LANES": padded(config.topk), "NUM_NODES": self.num_nodes,
            "DTYPE": TRITON_DTYPES[config.combined_dtype],
            "ELEMENT": tl.int16 if config.combined_dtype.itemsize == 2 else tl.int32, "HAS_WEIGHTS": has_weights,
        }  # fmt: skip
