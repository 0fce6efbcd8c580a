"""CollectiveDispatchCombineOp: an op on collectives. Ranks gather all tokens and keep those for their experts."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ep_a2a.config import EpDispatchCombineConfig, Layout, QuantType
from ep_a2a.config.requirements import checked_seconds
from ep_a2a.errors import CapacityError, ConfigMismatchError, UnsupportedError
from ep_a2a.interface import CombineResult, DispatchResult
from ep_a2a.memory.guards import outside_modes
from ep_a2a.ops.adapter import AdapterOp
from ep_a2a.ops.arguments import CombineArguments, Step, leading_dims
from ep_a2a.ops.bounds import by_rank
from ep_a2a.ops.config_agreement import agree_on_config
from ep_a2a.ops.row_exchange import RowExchange, row_bytes
from ep_a2a.ops.wire_word import bound_mask, disagreement, tagged, wire_word
from ep_a2a.routing import count_ids, destination_mask


@dataclass(frozen=True)
class _Route:
    """The routing of a dispatch, which its combine reverses.

    Attributes:
        counts: tokens of every rank.
        received: which of all ranks' tokens were received here, int64 [total_recv], ascending.
        slots: row of the output where each of them lies, int64 [total_recv].
    """

    counts: list[int]
    received: torch.Tensor
    slots: torch.Tensor


class CollectiveDispatchCombineOp(AdapterOp):
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

    adds_biases = True
    takes_bounds_by_rank = True
    takes = frozenset({"timeout_secs"})

    @outside_modes()
    def __init__(self, config: EpDispatchCombineConfig, exchange: RowExchange, device: torch.device) -> None:
        super().__init__(config, device)
        with exchange.groups.rendezvous.telling():
            _check_config(config)
            agree_on_config(config, exchange.groups.rendezvous)
        self._exchange = exchange
        # the tensors that calls return, at fixed addresses: R rows for dispatch, M rows for combine
        rows, max_tokens = config.max_num_recv_tokens, config.max_num_inp_token_per_rank
        empty = functools.partial(torch.empty, device=self.device)
        self._tokens = empty(rows, config.hidden_dim, dtype=config.wire_dtype)
        self._weights = empty(rows, config.topk, dtype=torch.float32)
        self._scales = empty(rows, config.num_scales * config.scale_bytes, dtype=torch.uint8)
        self._indices = empty(rows, config.topk, dtype=torch.int32)
        self._positions = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._result = empty(max_tokens, config.hidden_dim, dtype=config.combined_dtype)
        self._result_weights = empty(max_tokens, config.topk, dtype=torch.float32)

    def _send(self, step: Step) -> DispatchResult:
        weights, scales = step.weights, step.scales
        counts = self._agree(step)
        gather = functools.partial(self._exchange.gather_rows, counts=counts)

        all_ids = gather(step.ids)
        goes_to = destination_mask(all_ids, self.config.total_experts, self.config.world_size)
        self._check_capacity(goes_to, step.bounds.num_rows)
        received = goes_to[:, self.config.rank].nonzero().flatten()
        slots = self._place(received, counts, by_rank(self.config, step.step_tokens))
        self._indices.fill_(step.pad_id)
        self._indices.index_copy_(0, slots, all_ids[received])
        for target, rows in ((self._tokens, step.tokens), (self._weights, weights), (self._scales, scales)):
            if rows is not None:
                # bit for bit in any dtype
                row_bytes(target).index_copy_(0, slots, row_bytes(gather(rows))[received])
        first, num_experts = self.config.first_expert, self.config.num_local_experts
        if self.config.local_ids:
            local = all_ids[received] - first
            is_own = (local >= 0) & (local < num_experts)
            self._indices.index_copy_(0, slots, local.where(is_own, -1))
            self._weights.index_copy_(0, slots, self._weights[slots].where(is_own, 0))
        if step.counts_experts:
            self._local_expert_count.copy_(count_ids(all_ids[received], first, num_experts))
        step.route = _Route(counts, received, slots)
        lead = leading_dims(self.config, step.step_tokens).rows

        def view(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[: step.bounds.num_rows].view(*lead, tensor.shape[1])

        return DispatchResult(
            view(self._tokens),
            None if weights is None else view(self._weights),
            None if scales is None else view(self._scales.view(scales.dtype)),
            view(self._indices),
            self._total_recv,
        )

    def _agree(self, step: Step) -> list[int]:
        """Every rank's number of tokens. Raise ConfigMismatchError if the ranks' choices differ."""
        max_tokens = self.config.max_num_inp_token_per_rank
        has_weights, has_scales = step.weights is not None, step.scales is not None
        word = tagged(wire_word(step.bounds.own, has_weights, has_scales), step.tag, max_tokens)
        bounds = zlib.crc32(repr(list(by_rank(self.config, step.step_tokens))).encode())
        everyone = self._exchange.exchange_numbers([step.num_tokens, word, bounds])
        words = [other for _, other, _ in everyone]
        others = ~bound_mask(max_tokens)
        if len({(each & others, of_all) for each, (*_, of_all) in zip(words, everyone)}) > 1:
            raise ConfigMismatchError(*disagreement(words, max_tokens))
        return [count for count, *_ in everyone]

    def _check_capacity(self, goes_to: torch.Tensor, most: int) -> None:
        if not self.config.max_total_recv_tokens:
            return
        too_many = [f"{n} on rank {rank}" for rank, n in enumerate(goes_to.sum(0).tolist()) if n > most]
        if too_many:
            remedy = "Build another op with a larger max_total_recv_tokens (0 means no cap)."
            raise CapacityError(f"at most {most} received rows", ", ".join(too_many), remedy)

    def _place(self, received: torch.Tensor, counts: list[int], bounds: Sequence[int]) -> torch.Tensor:
        """The output row of each received token. Writes recv_counts, total_recv and the source positions."""
        ranks = torch.arange(self.config.world_size, device=self.device)
        starts = torch.tensor([sum(counts[:rank]) for rank in range(len(counts))], device=self.device)
        source = ranks.repeat_interleave(torch.tensor(counts, device=self.device))[received]
        token = received - starts[source]
        per_source = torch.bincount(source, minlength=self.config.world_size)
        self._recv_counts.copy_(per_source)
        self._total_recv.fill_(received.numel())
        self._positions = (source * self.config.world_size * self.config.max_num_inp_token_per_rank + token).to(
            torch.int32
        )
        row = torch.arange(received.numel(), device=self.device)
        if self.config.layout == Layout.COMPACT:
            return row
        room = torch.tensor(bounds, device=self.device)
        before = (room - per_source).cumsum(0) - (room - per_source)
        return row + before[source]

    def _bring_back(self, step: Step, args: CombineArguments) -> CombineResult:
        num_tokens, weights = step.num_tokens, args.weights
        result = self._result if args.out is None else args.out
        total = self._sum(args.rows.flatten(0, -2), step.route)
        for bias in args.biases:
            if bias is not None:
                total += bias
        result[:num_tokens] = total
        if weights is None:
            return CombineResult(result, None)
        self._result_weights[:num_tokens] = self._sum(weights.flatten(0, -2), step.route)
        return CombineResult(result, self._result_weights)

    def _sum(self, rows: torch.Tensor, route: _Route) -> torch.Tensor:
        """[T, width] float32: for each of this rank's tokens, the sum of its rows on all ranks."""
        by_token = rows.new_zeros(sum(route.counts), rows.shape[1])
        by_token.index_copy_(0, route.received, rows[route.slots])
        return self._exchange.sum_rows(by_token, route.counts)

    @property
    def expert_recv_count(self) -> torch.Tensor:
        """Raise UnsupportedError: collectives do not have layout expert_major."""
        raise UnsupportedError("layout expert_major", self.config.layout, "Use the backend 'ep_a2a' with that layout.")

    def get_dispatch_src_token_pos(self) -> torch.Tensor:
        """[total_recv] int32: source rank * (W * M) + source token of each row."""
        return self._positions

    def set_timeout(self, timeout_secs: float) -> None:
        """Bound the waits of calls on CPU from now on. On GPUs the process group's own time-out holds. Local."""
        self._exchange.timeout_secs = checked_seconds("timeout_secs", timeout_secs)


def _check_config(config: EpDispatchCombineConfig) -> None:
    """Raise UnsupportedError where collectives cannot serve the config."""
    if config.layout == Layout.EXPERT_MAJOR:
        raise UnsupportedError(
            "layout 'compact' or 'rank_major'",
            "'expert_major', which collectives do not have",
            "Use the backend 'ep_a2a', or sort the rows by their ids.",
        )
    if config.combine_quant is not QuantType.NONE:
        raise UnsupportedError(
            "a quant_type that acts on dispatch",
            f"{config.quant_type!r}: collectives combine unquantised",
            "Use the backend 'ep_a2a', or a quant_type that casts in dispatch.",
        )
