"""OpBuffers: the tensors that a collective op returns, at fixed addresses."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ep_a2a.config import Layout
from ep_a2a.interface import DispatchResult
from ep_a2a.ops.row_exchange import row_bytes

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig


class OpBuffers:
    """Result tensors for the largest step; R = config.max_num_recv_tokens rows.

    Attributes:
        tokens: [R, H] of wire_dtype. weights: float32 [R, K]. indices: int32 [R, K].
        scales: uint8 [R, bytes of a row's scales].
        total_recv: int32 [1]. recv_counts: int32 [W]. local_expert_count: int32 [E].
        result: [M, H] of combined_dtype. result_weights: float32 [M, K].
    """

    # what is made in inference mode cannot be written to outside of it
    @torch.inference_mode(mode=False)
    def __init__(self, config: EpDispatchCombineConfig, device: torch.device) -> None:
        self._config = config
        self._empty = functools.partial(torch.empty, device=device)
        rows, max_tokens, topk = config.max_num_recv_tokens, config.max_num_inp_token_per_rank, config.topk
        self.tokens = self._empty(rows, config.hidden_dim, dtype=config.wire_dtype)
        self.weights = self._empty(rows, topk, dtype=torch.float32)
        self.scales = self._empty(rows, config.num_scales * config.scale_bytes, dtype=torch.uint8)
        self.indices = self._empty(rows, topk, dtype=torch.int32)
        self.total_recv = torch.zeros(1, dtype=torch.int32, device=device)
        self.recv_counts = torch.zeros(config.world_size, dtype=torch.int32, device=device)
        self.local_expert_count = torch.zeros(config.num_local_experts, dtype=torch.int32, device=device)
        self.result = self._empty(max_tokens, config.hidden_dim, dtype=config.combined_dtype)
        self.result_weights = self._empty(max_tokens, topk, dtype=torch.float32)

    @functools.cached_property
    def combine_input(self) -> torch.Tensor:
        """The registered combine buffer, [R, H] of combined_dtype. The first access allocates it."""
        config = self._config
        return self._empty(config.max_num_recv_tokens, config.hidden_dim, dtype=config.combined_dtype)

    def is_combine_input(self, rows: torch.Tensor) -> bool:
        """Whether `rows` starts at the address of the registered combine buffer."""
        return "combine_input" in self.__dict__ and rows.data_ptr() == self.combine_input.data_ptr()

    def put(self, target: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy rows[chosen] to target[slots], bit for bit in any dtype."""
        row_bytes(target).index_copy_(0, slots, row_bytes(rows)[chosen])

    def put_indices(self, ids: torch.Tensor, slots: torch.Tensor, pad_id: int) -> None:
        """Write ids to indices[slots], and pad_id to all other rows."""
        self.indices.fill_(pad_id)
        self.indices.index_copy_(0, slots, ids)

    def dispatched(
        self, num_rows: int, step_tokens: int, has_weights: bool, scale_dtype: torch.dtype | None
    ) -> DispatchResult:
        """Views of the tensors in the op's layout; scales are None without a scale_dtype."""
        lead: tuple[int, ...] = (num_rows,)
        if self._config.layout == Layout.RANK_MAJOR:
            lead = (self._config.world_size, step_tokens)

        def view(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:num_rows].view(*lead, tensor.shape[1])

        scales = None if scale_dtype is None else view(self.scales.view(scale_dtype))
        return DispatchResult(
            view(self.tokens),
            view(self.weights) if has_weights else None,
            scales,
            view(self.indices),
            self.total_recv,
        )
