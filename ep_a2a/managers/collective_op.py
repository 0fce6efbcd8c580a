"""The op interface on collectives: every rank gathers all tokens and keeps the rows that are for it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ep_a2a.config import FP8_DTYPE, Layout, QuantType
from ep_a2a.config_fields import checked_timeout_secs
from ep_a2a.errors import (
    AlternationError,
    CapacityError,
    ClosedError,
    ConfigMismatchError,
    EpA2AError,
    ForeignIndicesError,
    UnsupportedError,
)
from ep_a2a.kernels.base_op import DispatchCombineBase, DispatchResult, agree_on_config
from ep_a2a.kernels.failures import describe_wire_word, wire_word
from ep_a2a.kernels.inputs import check_combine, check_dispatch, check_out
from ep_a2a.managers.halves import FirstHalfDoesAll
from ep_a2a.managers.op_buffers import OpBuffers
from ep_a2a.quantization import quantize
from ep_a2a.routing import destination_mask

if TYPE_CHECKING:
    from ep_a2a.config import EpDispatchCombineConfig
    from ep_a2a.managers.row_exchange import RowExchange


@dataclass(frozen=True)
class _Step:
    """What combine must know of the dispatch before it.

    Attributes:
        indices: a copy of this rank's ids.
        max_num_tokens: the step's.
        counts: tokens of every rank.
        received: which of all ranks' tokens were received here, int64 [total_recv], ascending.
        slots: row of the output where each of them lies, int64 [total_recv].
    """

    indices: torch.Tensor
    max_num_tokens: int
    counts: list[int]
    received: torch.Tensor
    slots: torch.Tensor


class CollectiveDispatchCombineOp(FirstHalfDoesAll, DispatchCombineBase):
    """EpDispatchCombineOp's interface and contract on a RowExchange instead of kernels.

    Received rows, ids, weights, scales and positions are bit for bit those of EpDispatchCombineOp. Combine adds in
    float32; its order of addition, hence the last bit, is the exchange's. Launch numbers and max_sms are without
    effect, and dispatch synchronises the host, so that it cannot be captured in a CUDA graph. Construction is
    collective.

    Args:
        config: shapes and choices; kernel_type does not matter.
        exchange: how rows are gathered and summed.
        device: where tensors lie.

    Raises:
        ConfigError: config and group disagree on rank or world size.
        ConfigMismatchError: configs differ between ranks; the error names the field and the ranks.
        UnsupportedError: quant_type asks for a quantised combine, or layout is expert_major.
    """

    def __init__(self, config: EpDispatchCombineConfig, exchange: RowExchange, device: torch.device) -> None:
        super().__init__(config, device)
        agree_on_config(config, exchange.groups.rendezvous, error=_own_error(config))
        self._exchange = exchange
        self._buffers = OpBuffers(config, device)
        self._step: _Step | None = None
        self._positions = torch.empty(0, dtype=torch.int32, device=device)
        self._closed = False

    def dispatch(
        self,
        input: torch.Tensor,  # noqa: A002  MORI's name
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        max_num_tokens: int | None = None,
        pad_id: int = -1,
    ) -> DispatchResult:
        """Brings each token once to every distinct rank that owns one of its experts; see EpDispatchCombineOp.dispatch.

        Returns:
            (tokens, weights or None, scales or None, indices, total_recv), of the same shapes and addresses rules.

        Raises:
            InputError: an argument does not fit; nothing was sent.
            AlternationError: the step before has not been combined.
            ConfigMismatchError: ranks disagree on max_num_tokens, or on whether weights and scales are given.
            CapacityError: a rank would receive more than max_total_recv_tokens; raised on all ranks.
            RankTimeoutError: on CPU, a rank did not come within timeout_secs.
        """
        self.check()
        self._no_open_half("dispatch")
        if self._step is not None:
            raise AlternationError("combine after dispatch", "dispatch again")
        config = self.config
        limit = config.max_num_inp_token_per_rank if max_num_tokens is None else max_num_tokens
        check_dispatch(config, self.device, input, weights, scales, indices, limit, pad_id)
        self._streams.follow(self.device)
        tokens, scales = self._travelling(input, scales)
        counts = self._agree(input.shape[0], wire_word(limit, weights is not None, scales is not None))
        gather = functools.partial(self._exchange.gather_rows, counts=counts)

        all_ids = gather(indices)
        goes_to = destination_mask(all_ids, config.total_experts, config.world_size)
        self._check_capacity(goes_to, limit)
        received = goes_to[:, config.rank].nonzero().flatten()
        slots = self._place(received, counts, limit)
        buffers = self._buffers
        buffers.put_indices(all_ids[received], slots, pad_id)
        buffers.put(buffers.tokens, gather(tokens), received, slots)
        if weights is not None:
            buffers.put(buffers.weights, gather(weights), received, slots)
        if scales is not None:
            buffers.put(buffers.scales, gather(scales), received, slots)
        if call_local_expert_count:
            self._count_local_experts(all_ids[received])
        self._step = _Step(indices.clone(), limit, counts, received, slots)
        scale_dtype = None if scales is None else scales.dtype
        return buffers.dispatched(self.num_rows(limit), limit, weights is not None, scale_dtype)

    def _travelling(
        self, tokens: torch.Tensor, scales: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens and scales as they travel: cast where the config says so."""
        if self.config.casts_in_dispatch and tokens.dtype != FP8_DTYPE:
            return quantize(tokens, self.config.dispatch_quant, self.config.scale_format)
        if self.config.casts_in_dispatch and scales is None:
            # Checked before: this rank has no tokens. The other ranks' scales must still find it taking part.
            scales = self._buffers.scales[:0].view(torch.float32 if self.config.scale_bytes == 4 else torch.uint8)
        return tokens, scales if scales is not None and self.config.num_scales else None

    def _agree(self, num_tokens: int, word: int) -> list[int]:
        """Every rank's number of tokens, after comparing what must be equal."""
        everyone = self._exchange.exchange_numbers([num_tokens, word])
        if len({other for _, other in everyone}) > 1:
            got = ", ".join(f"rank {rank}: {describe_wire_word(other)}" for rank, (_, other) in enumerate(everyone))
            raise ConfigMismatchError(
                "the same max_num_tokens, and weights and scales given or not alike, on all ranks", got,
                "Pass the same max_num_tokens on every rank.",
            )  # fmt: skip
        return [count for count, _ in everyone]

    def _check_capacity(self, goes_to: torch.Tensor, limit: int) -> None:
        if not self.config.max_total_recv_tokens:
            return
        most = self.num_rows(limit)
        too_many = [f"{n} on rank {rank}" for rank, n in enumerate(goes_to.sum(0).tolist()) if n > most]
        if too_many:
            raise CapacityError(f"at most {most} received rows", ", ".join(too_many), "Raise max_total_recv_tokens.")

    def _place(self, received: torch.Tensor, counts: list[int], limit: int) -> torch.Tensor:
        """Output row of each received token; also records counts per source and source positions."""
        ranks = torch.arange(self.config.world_size, device=self.device)
        starts = torch.tensor([sum(counts[:rank]) for rank in range(len(counts))], device=self.device)
        source = ranks.repeat_interleave(torch.tensor(counts, device=self.device))[received]
        token = received - starts[source]
        per_source = torch.bincount(source, minlength=self.config.world_size)
        self._buffers.recv_counts.copy_(per_source)
        self._buffers.total_recv.fill_(received.numel())
        self._positions = (source * self.max_num_tokens_to_send() + token).to(torch.int32)
        row = torch.arange(received.numel(), device=self.device)
        if self.config.layout == Layout.COMPACT:
            return row
        return source * limit + row - (per_source.cumsum(0) - per_source)[source]

    def _count_local_experts(self, ids: torch.Tensor) -> None:
        first, num_experts = self.config.first_expert, self.config.num_local_experts
        local = ids[(ids >= first) & (ids < first + num_experts)] - first
        self.local_expert_count.copy_(torch.bincount(local, minlength=num_experts))

    def combine(
        self,
        input: torch.Tensor,  # noqa: A002  MORI's name
        weights: torch.Tensor | None,
        indices: torch.Tensor | None,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums, for each of this rank's tokens, the rows of the ranks it went to; see EpDispatchCombineOp.combine.

        Returns:
            (result [M, H], of which the first T rows are this step's, or `out`; weight sums [M, K] or None).

        Raises:
            InputError, ForeignIndicesError: an argument does not fit; nothing was sent, combine can be repeated.
            AlternationError: there is no dispatch to combine.
            RankTimeoutError: on CPU, a rank did not come within timeout_secs.
        """
        self.check()
        self._no_open_half("combine")
        if self._step is None:
            raise AlternationError("dispatch before combine", "combine")
        step, config = self._step, self.config
        lead, num_tokens = self._lead(step.max_num_tokens), step.indices.shape[0]
        if isinstance(weights, torch.Tensor) and weights.numel() == 0:
            weights = None
        if isinstance(input, torch.Tensor) and input.dim() == 2 and self._buffers.is_combine_input(input):
            input = input[: math.prod(lead)]  # noqa: A001  the whole registered buffer may be passed
        check_combine(config, self.device, input, weights, indices, lead, num_tokens)
        rows = input.flatten(0, -2)
        if indices is not None and not torch.equal(indices, step.indices):
            raise ForeignIndicesError("combine's indices to be those given to this rank's dispatch", "others")
        result = self._buffers.result if out is None else out
        if out is not None:
            check_out(config, self.device, out, num_tokens)
        self._streams.follow(self.device)
        self._step = None
        result[:num_tokens] = self._sum(rows, step)
        if weights is None:
            return result, None
        self._buffers.result_weights[:num_tokens] = self._sum(weights.flatten(0, -2), step)
        return result, self._buffers.result_weights

    def _sum(self, rows: torch.Tensor, step: _Step) -> torch.Tensor:
        """Sum over ranks of the output rows that belong to this rank's tokens, float32 [T, width]."""
        by_token = rows.new_zeros(sum(step.counts), rows.shape[1])
        by_token.index_copy_(0, step.received, rows[step.slots])
        return self._exchange.sum_rows(by_token, step.counts)

    @property
    def recv_counts(self) -> torch.Tensor:
        """Rows received from each source in the last dispatch, int32 [W], fixed address."""
        return self._buffers.recv_counts

    @property
    def expert_recv_count(self) -> torch.Tensor:
        """Not here: collectives do not have layout expert_major."""
        raise UnsupportedError("layout expert_major", self.config.layout, "Use the backend 'ep_a2a' with that layout.")

    @property
    def local_expert_count(self) -> torch.Tensor:
        """Received rows per local expert, int32 [E], filled by dispatch(call_local_expert_count=True)."""
        return self._buffers.local_expert_count

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> torch.Tensor:
        """Rows [R at max_num_tokens = M, H] that combine takes; here they are copied like any other."""
        self._check_buffer_request(dtype, hidden_dim)
        return self._buffers.combine_input

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """Where each received row comes from: int32 [total_recv], source rank * (W * M) + token."""
        return self._positions

    def set_timeout(self, timeout_secs: float) -> None:
        """Bounds the waits of calls from now on, on CPU; on GPUs the process group's own timeout holds. Local."""
        self._exchange.timeout_secs = checked_timeout_secs(timeout_secs)

    @property
    def has_open_step(self) -> bool:
        """Whether a dispatch has not been combined, or a half not been finished."""
        return self._step is not None or self._open_call is not None

    def check(self) -> None:
        """Raises ClosedError after close; all other errors are raised by the call that meets them."""
        if self._closed:
            raise ClosedError("an open op", "a closed one")

    def reset(self) -> None:
        """Makes the op usable again after an unfinished step; to be called on every rank."""
        self.check()
        self._drop_half()
        self._step = None

    def close(self) -> None:
        """Ends the use of the op; local and idempotent. Its tensors live as long as somebody holds them."""
        self._closed = True


def _own_error(config: EpDispatchCombineConfig) -> EpA2AError | None:
    """Why this op cannot be built, or None."""
    if config.layout == Layout.EXPERT_MAJOR:
        return UnsupportedError(
            "layout 'compact' or 'rank_major'", "'expert_major', which collectives do not have",
            "Use the backend 'ep_a2a', or sort the rows by their ids.",
        )  # fmt: skip
    if config.combine_quant is QuantType.NONE:
        return None
    return UnsupportedError(
        "a quant_type that acts on dispatch", f"{config.quant_type!r}: collectives combine unquantised",
        "Use the backend 'ep_a2a', or quant_type='none', 'fp8_per_token' or 'fp8_per_1x128'.",
    )  # fmt: skip
