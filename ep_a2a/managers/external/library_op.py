"""What the ops on other projects' libraries share: what a library does not return, and how its steps are ended."""

from __future__ import annotations

import abc
import functools
import math
from typing import TYPE_CHECKING, Any, cast

import torch

from ep_a2a.errors import UnsupportedError
from ep_a2a.managers.external import received_rows
from ep_a2a.ops.adapter import AdapterOp, StepInputs
from ep_a2a.ops.base import leads

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.capabilities import Capabilities


NO_INDICES = cast("torch.Tensor", None)
"""What dispatch returns for indices where a library does not say which tokens came."""


class LibraryDispatchCombineOp(AdapterOp):
    """An op on a library's native object. How it differs from EpDispatchCombineOp, its capabilities say.

    Args:
        config: shapes and choices; checked against the capabilities.
        device: this rank's GPU.
        backend: the backend's name, for errors.
        capabilities: the backend's.
    """

    _native: Any

    def __init__(
        self, config: EpDispatchCombineConfig, device: torch.device, backend: str, capabilities: Capabilities
    ) -> None:
        super().__init__(config, device)
        self.backend, self.capabilities = backend, capabilities
        int32 = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        self._total_recv, self._recv_counts = int32(1), int32(config.world_size)
        self._local_expert_count, self._expert_recv_count = (int32(config.num_local_experts) for _ in range(2))

    @functools.cached_property
    def _combine_input(self) -> torch.Tensor:
        lead = leads(self.config, self.config.max_num_inp_token_per_rank)[1]
        shape = (math.prod(lead), self.config.hidden_dim)
        return torch.empty(shape, dtype=self.config.combined_dtype, device=self.device)

    def _is_registered(self, rows: torch.Tensor) -> bool:
        return "_combine_input" in self.__dict__ and rows.data_ptr() == self._combine_input.data_ptr()

    def _arrived(self, step: StepInputs, counts_per_source: torch.Tensor, ids: torch.Tensor | None) -> None:
        """Records what came: rows per source [W], and, if asked, rows per expert from padded global ids."""
        self._recv_counts.copy_(counts_per_source)
        self._total_recv.copy_(counts_per_source.sum(0, keepdim=True))
        if step.counts_experts and ids is not None:
            self._local_expert_count.copy_(
                received_rows.count_experts(ids, self.config.first_expert, self.config.num_local_experts)
            )

    def _check_weights(self, weights: torch.Tensor | None) -> None:
        if weights is not None and not self.capabilities.weight_sums:
            raise self._unsupported("sums of weights in combine")

    def _into(self, result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """A library's own result, or `out` with it."""
        return result if out is None else out.copy_(result[: out.shape[0]])

    def _positions(self) -> torch.Tensor:
        raise self._unsupported("source positions of received rows")

    def _unsupported(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"a backend with {what}", f"{self.backend!r}, which has none",
            "Use the backend 'ep_a2a'; `ep-a2a backends` shows what each can do.",
        )  # fmt: skip

    def _abandon(self, step: StepInputs) -> None:
        # Libraries count their steps on the device: a dispatch that is not combined would spoil the next one.
        rows = torch.zeros(*self._rows_lead, self.config.hidden_dim, dtype=self.config.combined_dtype,
                           device=self.device)  # fmt: skip
        self._bring_back(rows, None, step, None)

    @property
    def recv_counts(self) -> torch.Tensor:
        """Rows received from each source in the last dispatch, int32 [W], fixed address."""
        if not self.capabilities.recv_counts:
            raise self._unsupported("counts of received rows by source")
        return self._recv_counts

    @property
    def local_expert_count(self) -> torch.Tensor:
        """Received rows per local expert, int32 [E], filled by dispatch(call_local_expert_count=True)."""
        return self._local_expert_count

    @property
    def expert_recv_count(self) -> torch.Tensor:
        """Rows of each local expert in the last dispatch of layout expert_major, int32 [E], fixed address."""
        if "expert_major" not in self.capabilities.layouts:
            raise self._unsupported("layout expert_major")
        return self._expert_recv_count

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Rows that combine takes, ordinary memory: [R, H], in layout expert_major [E * R, H], R at M tokens."""
        self._check_buffer_request(dtype, hidden_dim)
        return self._combine_input

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Where each received row comes from: int32 [total_recv], source rank * (W * M) + token. Synchronises.

        To be called between dispatch and combine; on all ranks where source_positions is "collective".

        Raises:
            UnsupportedError: the library does not say.
        """
        return self._positions()

    def set_timeout(self, timeout_secs: float) -> None:
        """Not here: the library bounds its waits, or does not, by itself."""
        raise self._unsupported("waits that this package bounds")

    def close(self) -> None:
        """Ends the use of the op and gives the library's object back; to be called on every rank; idempotent."""
        if not self._closed:
            super().close()
            self._destroy()

    @abc.abstractmethod
    def _destroy(self) -> None:
        """Gives the library's object back. Called once."""
