"""Layout expert_major: launches that turn received rows (as in rank_major) into rows by expert, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.kernels.compiled_kernel import TRITON_DTYPES, CompiledKernel
from ep_a2a.kernels.constants import Expand, constants
from ep_a2a.kernels.expert_kernels import expand_kernel, number_expert_rows_kernel, reduce_experts_kernel
from ep_a2a.kernels.layout import WORD_BYTES, padded
from ep_a2a.ops.row_constants import scale_constants
from ep_a2a.policy import INTERPRETED_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ep_a2a.ops.op_kernels import OpKernels

NUMBER_WARPS = 8
NUMBERED_IDS = 8192
"""Received ids that a program reads at once: few rounds for many rows, and no more than registers hold."""
EXPAND_WARPS = 8
MAX_EXPAND_WORDS = 4096
REDUCE_WARPS = 4
REDUCE_ELEMENTS = 1024
THREADS_PER_SM = 1024
"""Threads per multiprocessor that keep memory busy. These programs never wait, so more of them would also finish."""


class ExpertMajorKernels:
    """Compiles and launches the local kernels of layout expert_major.

    Args:
        kernels: of the op.
    """

    def __init__(self, kernels: OpKernels) -> None:
        self._kernels, self.config = kernels, kernels.config
        config = self.config
        self._first_expert = config.first_expert
        self._row_words = config.hidden_dim * config.wire_dtype.itemsize // WORD_BYTES
        common = {"S": kernels.shape, "SPANS": kernels.spans}
        block_rows = max(1, NUMBERED_IDS // padded(config.topk))
        most_rows = padded(config.world_size * config.max_num_inp_token_per_rank)
        self._number = CompiledKernel(
            number_expert_rows_kernel, common | {"BLOCK_ROWS": min(block_rows, most_rows)}, NUMBER_WARPS
        )
        self._expand = {
            has_scales: CompiledKernel(expand_kernel, common | {"E": self._expand_constants(has_scales)}, EXPAND_WARPS)
            for has_scales in ((False, True) if config.num_scales else (False,))
        }
        block = min(padded(config.hidden_dim), REDUCE_ELEMENTS)
        self._num_row_blocks = -(-self._row_words // min(padded(self._row_words), MAX_EXPAND_WORDS))
        self._num_sum_blocks = -(-config.hidden_dim // block)
        dtype = TRITON_DTYPES[config.combined_dtype]
        self._reduce = CompiledKernel(
            reduce_experts_kernel, common | {"HIDDEN": config.hidden_dim, "BLOCK": block, "DTYPE": dtype}, REDUCE_WARPS
        )

    def _expand_constants(self, has_scales: bool) -> Expand:
        config = self.config
        # no block has more rows, and a larger number would overflow the kernel's
        alignment = min(config.expert_alignment, config.world_size * config.max_num_inp_token_per_rank)
        values = {
            "ROW_WORDS": self._row_words,
            "BLOCK_WORDS": min(padded(self._row_words), MAX_EXPAND_WORDS),
            "ALIGNMENT": alignment,
        }
        return constants(Expand, values | scale_constants(config.num_scales * config.scale_bytes if has_scales else 0))

    def expand(self, step_tokens: int, has_scales: bool) -> None:
        """Launch the copy of the received rows to a block for each expert.

        The launch that numbers the rows has a short program for each expert, whatever bounds the multiprocessors.

        Args:
            step_tokens: the step's bound.
            has_scales: whether the rows have scales.
        """
        values, num_experts = self._values(step_tokens), self.config.num_local_experts
        # a rank without experts receives nothing, and a launch needs a program
        self._number.run(max(1, num_experts), (*values, self._first_expert, num_experts), self._kernels.device)
        expand = self._expand[has_scales]
        self._run(expand, (*values, num_experts), self._num_row_blocks, step_tokens)

    def reduce(self, rows: torch.Tensor, step_tokens: int) -> None:
        """Launch the weighted sum of the experts' rows, [E, W * step_tokens, H], into REDUCED_ROWS."""
        values = (rows, *self._values(step_tokens))
        self._run(self._reduce, values, self._num_sum_blocks, step_tokens)

    def compiled_kernels(self) -> Iterator[tuple[CompiledKernel, tuple[Any, ...]]]:
        """Every (kernel, run-time arguments) that a step can need, with stand-in tensors."""
        values, num_experts = self._values(1), self.config.num_local_experts
        yield self._number, (*values, self._first_expert, num_experts)
        for expand in self._expand.values():
            yield expand, (*values, num_experts)
        yield self._reduce, (torch.empty(16, dtype=self.config.combined_dtype, device=self._kernels.device), *values)

    def _values(self, step_tokens: int) -> tuple[Any, ...]:
        return self._kernels.table, step_tokens, self.config.rank

    def _run(self, kernel: CompiledKernel, values: tuple[Any, ...], num_blocks: int, step_tokens: int) -> None:
        """Launch a program for each possible block of rows, but no more than keep the multiprocessors busy."""
        num_sms, max_sms = self._kernels.num_sms, self._kernels.max_sms
        most = num_sms * max(1, THREADS_PER_SM // (32 * kernel.num_warps)) or INTERPRETED_PROGRAMS
        if 0 < max_sms < num_sms:
            most = max_sms  # the GPU spreads programs over all it has
        kernel.run(min(self.config.world_size * step_tokens * num_blocks, most), values, self._kernels.device)
