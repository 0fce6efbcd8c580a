"""The rows and weights that our combine takes, of those that MORI's does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig


class CombineInput:
    """Finds the rows that MORI's combine would read, and brings them to the number of rows that ours wants.

    MORI reads rows up to total_recv, so that its callers may pass fewer than dispatch returned (ATOM cuts off what
    cannot be used). Ours wants one for each.

    Args:
        native: our op. config: its configuration.
    """

    def __init__(self, native: Any, config: EpDispatchCombineConfig) -> None:
        self._native, self._config = native, config
        self._registered: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._weights: torch.Tensor | None = None

    def registered(self, dtype: torch.dtype, hidden_dim: int) -> torch.Tensor:
        """The op's buffer for combine's input."""
        self._registered = self._native.get_registered_combine_input_buffer(dtype, hidden_dim)
        return self._registered

    def of(
        self, rows: torch.Tensor, weights: torch.Tensor | None, use_external_inp_buf: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows, weights) for our combine; whatever does not fit is left for it to refuse.

        Args:
            rows, weights: as given to MORI's combine.
            use_external_inp_buf: 0, 1, or -1 for what the config says.
        """
        external = self._config.use_external_inp_buf if use_external_inp_buf < 0 else bool(use_external_inp_buf)
        if not external and self._registered is not None:
            return self._registered, weights
        num_rows = self._config.max_num_expert_rows
        if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or rows.shape[0] >= num_rows:
            return rows, weights
        if isinstance(weights, torch.Tensor) and weights.dim() == 2 and 0 < weights.shape[0] == rows.shape[0]:
            self._weights = weights = _extended(weights, num_rows, self._weights)
        if rows.shape[1] == self._config.hidden_dim and rows.dtype == self._config.combined_dtype:
            self._rows = rows = _extended(rows, num_rows, self._rows)
        return rows, weights


def _extended(tensor: torch.Tensor, num_rows: int, buffer: torch.Tensor | None) -> torch.Tensor:
    """`tensor` with rows behind it up to `num_rows`, in `buffer` where that fits."""
    shape = (num_rows, *tensor.shape[1:])
    if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (shape, tensor.dtype, tensor.device):
        buffer = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    buffer[: tensor.shape[0]] = tensor
    return buffer
