"""Base of the ops on other projects' libraries, and the record of a dispatch's results in this package's terms."""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ep_a2a.errors import UnsupportedError
from ep_a2a.graph_breaks import outside_graphs
from ep_a2a.interface import CombineResult, DispatchResult
from ep_a2a.memory.guards import outside_modes
from ep_a2a.ops.adapter import AdapterOp
from ep_a2a.ops.arguments import CombineArguments
from ep_a2a.routing import count_ids

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.external.library_manager import LibraryAll2AllManager
    from ep_a2a.ops.arguments import Step
    from ep_a2a.topology import Topology


class ReceivedRows(NamedTuple):
    """The rows that a library returned for a dispatch, in this package's terms.

    Attributes:
        tokens, scales: the rows, and the scales of quantised ones.
        ids: int32 global ids, pad_id in rows without a token; None if the library returns none.
        weights: float32, in the order of the rows; None if the library returns none.
        per_source: int32 [W], rows from each source; None if the library does not say.
        per_expert: int32 [E], rows of each expert in layout expert_major.
        total: int32 [1], all rows, where neither count says it.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    per_source: torch.Tensor | None = None
    per_expert: torch.Tensor | None = None
    total: torch.Tensor | None = None


class LibraryDispatchCombineOp(AdapterOp):
    """An op on a library's native object. The manager's capabilities list how it differs from EpDispatchCombineOp.

    Args:
        manager: the backend's. Its refusals have been checked against the config.
        config: shapes and choices.
        topology: nodes of the group.
        index: ops of different indices use memory apart from each other.
    """

    @outside_modes()
    def __init__(
        self, manager: LibraryAll2AllManager, config: EpDispatchCombineConfig, topology: Topology, index: int
    ) -> None:
        super().__init__(config, manager.device)
        self.backend, self.capabilities = manager.backend, manager.capabilities
        # a source position is source rank * W * M + token
        self._position_stride = config.world_size * config.max_num_inp_token_per_rank
        # of the step in progress: the library's handle, and the ids as the library was given them
        self._handle: Any = None
        self._sent_ids: torch.Tensor | None = None
        int32 = functools.partial(torch.zeros, dtype=torch.int32, device=self.device)
        self._total_recv, self._recv_counts = int32(1), int32(config.world_size)
        self._local_expert_count, self._expert_recv_count = (int32(config.num_local_experts) for _ in range(2))
        self._native: Any = self._allocated(manager, topology, index)

    @abc.abstractmethod
    def _allocated(self, manager: LibraryAll2AllManager, topology: Topology, index: int) -> Any:
        """Allocates all that the op needs beside its counts, and returns the library's object. Collective."""

    @abc.abstractmethod
    def _exchange_rows(self, step: Step) -> ReceivedRows:
        """Dispatches by the library."""

    def _send(self, step: Step) -> DispatchResult:
        got, config = self._exchange_rows(step), self.config
        if got.per_source is not None:
            self._recv_counts.copy_(got.per_source)
        per_expert = got.per_expert
        if per_expert is not None:
            self._expert_recv_count.copy_(per_expert)
        elif step.counts_experts and got.ids is not None:
            per_expert = count_ids(got.ids, config.first_expert, config.num_local_experts)
        if step.counts_experts and per_expert is not None:
            self._local_expert_count.copy_(per_expert)
        counts = next(each for each in (got.total, got.per_source, got.per_expert) if each is not None)
        self._total_recv.copy_(counts.sum(0, keepdim=True))
        weights = None if step.weights is None else got.weights
        # None where the library does not say which tokens came
        return DispatchResult(got.tokens, weights, got.scales, cast("torch.Tensor", got.ids), self._total_recv)

    def _check_weights(self, weights: torch.Tensor | None) -> None:
        if weights is not None and not self.capabilities.weight_sums:
            raise self._unsupported("sums of weights in combine")

    def _combine_result(
        self, result: torch.Tensor, args: CombineArguments, sums: torch.Tensor | None = None
    ) -> CombineResult:
        """The library's own result, or `out` with a copy of it; and the sums of weights."""
        out = args.out
        return CombineResult(result if out is None else out.copy_(result[: out.shape[0]]), sums)

    def _positions(self) -> torch.Tensor:
        raise self._unsupported("source positions of received rows")

    def _unsupported(self, ability: str) -> UnsupportedError:
        return UnsupportedError(
            f"a backend with {ability}",
            f"{self.backend!r}, which has none",
            "Use the backend 'ep_a2a'; `ep-a2a backends` shows what each can do.",
        )

    def _abandon(self, step: Step) -> None:
        # Libraries count their steps on the device: a dispatch that is not combined would spoil the next one.
        rows = torch.zeros(*step.lead, self.config.hidden_dim, dtype=self.config.combined_dtype, device=self.device)
        self._bring_back(step, CombineArguments(rows, None, None))

    @property
    def recv_counts(self) -> torch.Tensor:
        """Rows received from each source in the last dispatch, int32 [W], fixed address."""
        if not self.capabilities.recv_counts:
            raise self._unsupported("counts of received rows by source")
        return self._recv_counts

    @property
    def local_expert_count(self) -> torch.Tensor:
        """Received slots per local expert, int32 [E], filled by dispatch(call_local_expert_count=True)."""
        return self._local_expert_count

    @property
    def expert_recv_count(self) -> torch.Tensor:
        """Rows of each local expert in the last dispatch of layout expert_major, int32 [E], fixed address."""
        if "expert_major" not in self.capabilities.layouts:
            raise self._unsupported("layout expert_major")
        return self._expert_recv_count

    @outside_graphs
    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """The source of each received row: int32 [total_recv], source rank * (W * M) + token. Synchronises.

        Must be called between dispatch and combine.

        Raises:
            UnsupportedError: the library does not say.
        """
        return self._positions()

    def set_timeout(self, timeout_secs: float) -> None:
        """Raises UnsupportedError: a library has its own time-outs, or none."""
        raise self._unsupported("waits that this package bounds")

    def _close(self) -> None:
        """Gives the library's object back. Collective."""
        self._destroy()
        self._native = self._handle = self._sent_ids = None

    def _destroy(self) -> None:
        """Frees resources that the library keeps when its object is deleted. Called once."""
