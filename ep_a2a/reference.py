"""Executable specification of dispatch, experts and combine in plain torch: one process, all ranks at once.

No fast path uses it. It shares no code with the kernels, nor with routing.py, so that a mistake made there shows as a
difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ep_a2a.config import Layout, parse_enum
from ep_a2a.errors import ConfigError, DtypeError, InputError, ShapeError, TooManyTokensError, TopKError


@dataclass(frozen=True, eq=False)
class DispatchReference:
    """The rows that one destination rank receives, ascending by (source rank, source token), and their metadata.

    N = total_recv. Layout compact: the tensors have exactly N rows. Layout rank_major: they are
    `[W, step_tokens, ...]` with source s's rows dense from the front of block s; with a bound for each rank `[R, ...]`,
    R the sum of bounds, with source s's rows dense from the sum of earlier bounds. Past a source's rows ids hold
    pad_id, source positions -1, and tokens, weights and scales zeros, which no op promises. Layout expert_major: ids
    and source positions as in rank_major; tokens `[E, R, H]`, weights `[E, R]` and scales `[E, R, S]` by local expert,
    R = W * step_tokens or the sum of bounds, one row for each token that names it, with the sum of the weights that its
    slots with that id have; past an expert's rows zeros, which an op promises up to its expert_alignment only.

    Attributes:
        tokens: `[N, H]`, dtype of the tokens sent, bit for bit.
        weights: float32 `[N, K]`, all of a token's router weights, with local_ids 0 for experts of other ranks; None if
            none were given.
        scales: `[N, S]` as sent; None if none were given.
        ids: int32 `[N, K]`, all of a token's global expert ids, invalid ones unchanged; with local_ids the positions of
            the experts among this rank's, -1 for others.
        source_positions: int32 `[N]`, source_rank * tokens_per_source + source_token.
        counts_per_source: int32 `[W]`, rows received from each source rank.
        total_recv: N.
        tokens_per_source: stride of source positions, W * M.
        layout: how the tensors are arranged.
        bounds: where each rank has a bound of its own, these; else None.
        expert_counts: int32 `[E]`, rows of each local expert; these three in layout expert_major only.
        expert_rows: int64 `[N, K]`, for each slot of the received rows the row in `[E * R, ...]` that
            its expert has it in, -1 where the id is not a local expert's.
        slot_weights: float32 `[N, K]`, all router weights of the received rows.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor
    source_positions: torch.Tensor
    counts_per_source: torch.Tensor
    total_recv: int
    tokens_per_source: int
    layout: Layout
    bounds: Sequence[int] | None = None
    expert_counts: torch.Tensor | None = None
    expert_rows: torch.Tensor | None = None
    slot_weights: torch.Tensor | None = None

    def rows_of_source(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The rows that came from rank `source`, of this reference's or an op's tensor in this reference's layout.

        In layout expert_major, of ids and source positions only.
        """
        counts = self.counts_per_source.tolist()
        if self.layout != Layout.COMPACT and self.bounds is None:
            return tensor[source, : counts[source]]
        start = sum((counts if self.bounds is None or self.layout == Layout.COMPACT else self.bounds)[:source])
        return tensor[start : start + counts[source]]

    def valid_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The N received rows `[N, ...]` in reference order, of a tensor in this reference's layout."""
        return torch.cat([self.rows_of_source(tensor, source) for source in range(self.counts_per_source.numel())])

    def padding_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows past the received ones, of a tensor in this reference's layout; an op's ids are pad_id there."""
        if self.layout == Layout.COMPACT:
            return tensor[self.total_recv :]
        blocks = tensor if self.bounds is None else torch.split(tensor, list(self.bounds))
        return torch.cat([block[count:] for block, count in zip(blocks, self.counts_per_source.tolist())])


def dispatch_reference(
    tokens: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor | None],
    scales: Sequence[torch.Tensor | None],
    ids: Sequence[torch.Tensor],
    *,
    num_experts: int,
    step_tokens: int | Sequence[int],
    layout: Layout | str = Layout.COMPACT,
    stride_tokens: int | None = None,
    pad_id: int = -1,
    local_ids: bool = False,
) -> list[DispatchReference]:
    """Computes what every rank receives: each token once per distinct rank that owns one of its experts.

    Args:
        tokens: W tensors `[T_r, H]` of one dtype, by source rank; T_r may be 0.
        weights: W router weights float32 `[T_r, K]`, or W times None.
        scales: W scales `[T_r, S]` of quantised tokens, or W times None.
        ids: W expert ids int32 `[T_r, K]`; ids outside `[0, num_experts)` are dropped slots that route nothing.
        num_experts: experts over all ranks, owned linearly: the first `num_experts % W` ranks own one more.
        step_tokens: the most tokens that any rank may bring, rows per source in layout rank_major; or a bound for each
            rank.
        layout: one of Layout's values.
        stride_tokens: M in the source positions, source_rank * (W * M) + source_token; None = the largest bound.
        pad_id: id past the received rows of the layouts rank_major and expert_major.
        local_ids: a rank's ids count its own experts from 0.

    Returns:
        One DispatchReference per destination rank.

    Raises:
        DtypeError, ShapeError, TopKError, TooManyTokensError: the tensors do not fit each other or step_tokens.
        ConfigError: source positions do not fit int32.
        UnknownNameError: layout is not known.
        InputError: layout expert_major without weights.
    """
    kind: Layout = parse_enum(Layout, layout, "layout")
    world_size = len(tokens)
    bounds = [step_tokens] * world_size if isinstance(step_tokens, int) else list(step_tokens)
    if len(bounds) != world_size or min(bounds, default=0) < 0:
        raise InputError(f"step_tokens as one number, or {world_size} from 0 on", str(step_tokens))
    stride = world_size * (max(bounds) if stride_tokens is None else stride_tokens)
    if world_size * stride > 2**31:
        raise ConfigError("source positions W * W * M to fit int32", str(world_size * stride))
    _check_dispatch_inputs(tokens, ids, bounds)
    given_weights = _all_or_none("weights", weights, ids)
    given_scales = _all_or_none("scales", scales, ids)
    if kind == Layout.EXPERT_MAJOR and given_weights is None:
        raise InputError("weights with layout expert_major", "none")
    owners = [_owners(rank_ids, num_experts, world_size) for rank_ids in ids]
    positions = [
        torch.arange(rank_ids.shape[0], dtype=torch.int32) + source * stride for source, rank_ids in enumerate(ids)
    ]
    packed = not isinstance(step_tokens, int)
    step = _Step(tokens, given_weights, given_scales, ids, positions, owners, stride, kind, bounds, packed, pad_id)
    received = [_received(step, destination) for destination in range(world_size)]
    owned = _owners(torch.arange(num_experts), num_experts, world_size)
    experts = [(owned == rank).nonzero().flatten().tolist() for rank in range(world_size)]
    if kind == Layout.EXPERT_MAJOR:
        received = [_by_expert(*each) for each in zip(received, experts)]
    return [_with_local_ids(*each) for each in zip(received, experts)] if local_ids else received


def combine_reference(
    expert_rows: Sequence[torch.Tensor],
    dispatched: Sequence[DispatchReference],
    num_tokens: Sequence[int],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Sum each token's rows over the ranks it was sent to, ascending, in float32 from 0, and round once to dtype.

    Router weights are not applied: the experts have done that. Experts that return their input give
    x * (number of distinct ranks), up to the rounding to dtype.

    Args:
        expert_rows: by rank, the experts' `[N, H]` for the N received rows, in `DispatchReference.valid_rows` order.
        dispatched: what every rank received.
        num_tokens: T_r by rank.
        dtype: dtype of the result.

    Returns:
        `[T_r, H]` by source rank; zeros where every slot of a token was dropped.

    Raises:
        ShapeError: a rank's rows are not as many as it received.
    """
    hidden_dim = expert_rows[0].shape[1]
    sums = [torch.zeros(count, hidden_dim, dtype=torch.float32) for count in num_tokens]
    for rows, received in zip(expert_rows, dispatched, strict=True):
        if tuple(rows.shape) != (received.total_recv, hidden_dim):
            raise ShapeError(f"expert rows of shape {(received.total_recv, hidden_dim)}", str(tuple(rows.shape)))
        positions = received.valid_rows(received.source_positions)
        start = 0
        for source, count in enumerate(received.counts_per_source.tolist()):
            source_tokens = positions[start : start + count] - source * received.tokens_per_source
            sums[source][source_tokens] += rows[start : start + count].to(torch.float32)
            start += count
    return [total.to(dtype) for total in sums]


def reduce_experts_reference(results: torch.Tensor, received: DispatchReference, dtype: torch.dtype) -> torch.Tensor:
    """Computes the rows that one rank's combine of layout expert_major sends: its experts' rows, weighed and added.

    Args:
        results: the experts' `[E, R, H]`; rows past `expert_counts` are not read.
        received: what the rank received, in layout expert_major.
        dtype: dtype of the result.

    Returns:
        `[N, H]`: the sum over slots of weight * row in ascending order, in float32 from 0, rounded once; what
        `combine_reference` takes.
    """
    assert received.expert_rows is not None
    assert received.slot_weights is not None
    flat = results.flatten(0, 1)
    total = torch.zeros(received.total_recv, results.shape[2])
    for rows, weights in zip(received.expert_rows.T, received.slot_weights.T):
        local = rows >= 0
        total[local] += weights[local, None] * flat[rows[local]].to(torch.float32)
    return total.to(dtype)


def combine_weights_reference(
    expert_weights: Sequence[torch.Tensor], dispatched: Sequence[DispatchReference], num_tokens: Sequence[int]
) -> list[torch.Tensor]:
    """Sum each token's weight rows as `combine_reference` sums its token rows.

    Args:
        expert_weights: by rank, float32 `[N, K]` for the N received rows; unchanged dispatched weights give
            weights * (number of distinct ranks).
        dispatched: what every rank received.
        num_tokens: T_r by rank.

    Returns:
        float32 `[T_r, K]` by source rank.

    Raises:
        ShapeError: a rank's rows are not as many as it received.
    """
    return combine_reference(expert_weights, dispatched, num_tokens, torch.float32)


def dense_moe(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Mixture of SwiGLU experts without any communication, in float32: what dispatch, experts and combine must equal.

    out = sum over valid slots k of weights[k] * (silu(x gate^T) * (x up^T)) w2[ids[k]]^T, where gate is the first F
    rows of w1[ids[k]] and up the others. A repeated id counts once per slot.

    Args:
        x: `[T, H]`, floating point.
        weights: router weights `[T, K]`.
        ids: expert ids `[T, K]`; ids outside `[0, E)` contribute nothing.
        w1: gate and up projections `[E, 2F, H]`.
        w2: down projections `[E, H, F]`.

    Returns:
        float32 `[T, H]`.
    """
    return _weighted_experts(x, ids, weights, w1, w2, range(w1.shape[0]))


def expert_mlp_rows(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    row_weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    first_expert: int,
    num_local: int,
) -> torch.Tensor:
    """One rank's experts on its received rows: the weighted sum over this rank's own experts, one row per row.

    Args:
        rows: `[N, H]`, floating point; rows that name none of this rank's experts give zeros.
        row_ids: global expert ids `[N, K]`, also other ranks' and invalid ones.
        row_weights: router weights `[N, K]`.
        w1: gate and up projections of all experts `[E, 2F, H]`; only this rank's are read.
        w2: down projections of all experts `[E, H, F]`; only this rank's are read.
        first_expert: this rank's first expert.
        num_local: experts of this rank.

    Returns:
        `[N, H]`, computed in float32 as in `dense_moe` and rounded once to the dtype of rows.
    """
    own = range(first_expert, first_expert + num_local)
    return _weighted_experts(rows, row_ids, row_weights, w1, w2, own).to(rows.dtype)


def _weighted_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, experts: range
) -> torch.Tensor:
    x = x.to(torch.float32)
    out = torch.zeros_like(x)
    for expert in experts:
        slots = ids == expert
        chosen = slots.any(dim=1).nonzero().flatten()
        gate, up = (x[chosen] @ w1[expert].to(torch.float32).T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ w2[expert].to(torch.float32).T
        weight = torch.where(slots, weights.to(torch.float32), 0.0)[chosen].sum(dim=1, keepdim=True)
        out[chosen] += weight * rows
    return out


class _Step(NamedTuple):
    """The tensors that all ranks bring to a dispatch, by source rank, and the form of the result."""

    tokens: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor] | None
    scales: Sequence[torch.Tensor] | None
    ids: Sequence[torch.Tensor]
    positions: Sequence[torch.Tensor]
    owners: Sequence[torch.Tensor]
    tokens_per_source: int
    layout: Layout
    bounds: list[int]
    packed: bool
    pad_id: int


def _received(step: _Step, destination: int) -> DispatchReference:
    """Computes the rows of one destination rank, by source."""
    sent = [(owner == destination).any(dim=1).nonzero().flatten() for owner in step.owners]
    counts = [rows.numel() for rows in sent]
    rows = None if step.layout == Layout.COMPACT else step.bounds

    def arrange(parts: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
        arranged = _arrange(parts, sent, rows, fill)
        return arranged if rows is None or step.packed else arranged.view(len(rows), rows[0], *arranged.shape[1:])

    return DispatchReference(
        tokens=arrange(step.tokens, 0),
        weights=None if step.weights is None else arrange(step.weights, 0),
        scales=None if step.scales is None else arrange(step.scales, 0),
        ids=arrange(step.ids, step.pad_id),
        source_positions=arrange(step.positions, -1),
        counts_per_source=torch.tensor(counts, dtype=torch.int32),
        total_recv=sum(counts),
        tokens_per_source=step.tokens_per_source,
        layout=step.layout,
        bounds=step.bounds if step.packed else None,
    )


def _by_expert(received: DispatchReference, experts: Sequence[int]) -> DispatchReference:
    """Rearranges received rows from an order by source to one by `experts`."""
    ids, tokens = received.valid_rows(received.ids), received.valid_rows(received.tokens)
    assert received.weights is not None
    slot_weights = received.valid_rows(received.weights)
    scales = None if received.scales is None else received.valid_rows(received.scales)
    block_rows = received.ids.shape[:-1].numel()
    shape = (len(experts), block_rows)
    by_expert = torch.zeros(*shape, tokens.shape[1], dtype=tokens.dtype)
    weights_by_expert = torch.zeros(shape)
    scales_by_expert = None if scales is None else torch.zeros(*shape, scales.shape[1], dtype=scales.dtype)
    expert_rows = torch.full(ids.shape, -1, dtype=torch.int64)
    counts = []
    for number, expert in enumerate(experts):
        slots = ids == expert
        rows = slots.any(dim=1).nonzero().flatten().tolist()
        counts.append(len(rows))
        for place, row in enumerate(rows):
            by_expert[number, place] = tokens[row]
            if scales is not None and scales_by_expert is not None:
                scales_by_expert[number, place] = scales[row]
            for slot in slots[row].nonzero().flatten().tolist():
                weights_by_expert[number, place] += slot_weights[row, slot]
                expert_rows[row, slot] = number * block_rows + place
    return replace(
        received,
        tokens=by_expert,
        weights=weights_by_expert,
        scales=scales_by_expert,
        expert_counts=torch.tensor(counts, dtype=torch.int32),
        expert_rows=expert_rows,
        slot_weights=slot_weights,
    )


def _with_local_ids(received: DispatchReference, experts: Sequence[int]) -> DispatchReference:
    """Replaces ids by their positions in `experts`, and the weights of others by 0; rows without a token stay."""
    ids = received.ids.clone()
    weights = None if received.weights is None else received.weights.clone()
    for source in range(received.counts_per_source.numel()):
        given, rows = received.rows_of_source(received.ids, source), received.rows_of_source(ids, source)
        rows.fill_(-1)
        for number, expert in enumerate(experts):
            rows[given == expert] = number
        if weights is not None and received.layout != Layout.EXPERT_MAJOR:
            received.rows_of_source(weights, source)[rows < 0] = 0
    return replace(received, ids=ids, weights=weights)


def _owners(ids: torch.Tensor, num_experts: int, world_size: int) -> torch.Tensor:
    # A table instead of a division: the formula under test is not repeated here.
    share, remainder = divmod(num_experts, world_size)
    table = [rank for rank in range(world_size) for _ in range(share + (rank < remainder))]
    outside = len(table)
    wide = ids.to(torch.int64)
    inside = (wide >= 0) & (wide < num_experts)
    return torch.tensor([*table, -1])[torch.where(inside, wide, outside)]


def _arrange(
    parts: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], bounds: Sequence[int] | None, fill: int
) -> torch.Tensor:
    # Index lists are ascending, so concatenation gives (source rank, source token) order.
    chosen = [part[rows] for part, rows in zip(parts, sent)]
    if bounds is None:
        return torch.cat(chosen)
    arranged = torch.full((sum(bounds), *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
    for block, rows in zip(torch.split(arranged, list(bounds)), chosen):
        block[: rows.shape[0]] = rows
    return arranged


def _all_or_none(
    name: str, parts: Sequence[torch.Tensor | None], ids: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    present = [part for part in parts if part is not None]
    if not present and len(parts) == len(ids):
        return None
    if len(present) != len(ids) or len(parts) != len(ids):
        raise ShapeError(f"{name} on all {len(ids)} ranks or on none", f"{len(present)} of {len(parts)}")
    rows = [part.shape[0] for part in present]
    if rows != [rank_ids.shape[0] for rank_ids in ids]:
        raise ShapeError(f"{name} with a row for every token", str(rows))
    return present


def _check_dispatch_inputs(tokens: Sequence[torch.Tensor], ids: Sequence[torch.Tensor], bounds: Sequence[int]) -> None:
    if not tokens or len(ids) != len(tokens):
        raise ShapeError("tokens and ids of every rank, at least one", f"{len(tokens)} and {len(ids)}")
    for rank, (rank_tokens, rank_ids) in enumerate(zip(tokens, ids)):
        if rank_ids.dtype != torch.int32:
            raise DtypeError(f"ids of rank {rank} of dtype torch.int32", str(rank_ids.dtype))
        if rank_tokens.dtype != tokens[0].dtype:
            raise DtypeError(f"tokens of rank {rank} of dtype {tokens[0].dtype}", str(rank_tokens.dtype))
        if rank_tokens.ndim != 2 or rank_tokens.shape[1:] != tokens[0].shape[1:]:
            raise ShapeError(f"tokens of rank {rank} as [T, H] with one H", str(tuple(rank_tokens.shape)))
        if rank_ids.ndim != 2 or rank_ids.shape[0] != rank_tokens.shape[0]:
            raise ShapeError(f"ids of rank {rank} as [{rank_tokens.shape[0]}, K]", str(tuple(rank_ids.shape)))
        if rank_ids.shape[1] != ids[0].shape[1]:
            raise TopKError(f"K = {ids[0].shape[1]} on rank {rank} too", str(rank_ids.shape[1]))
        if rank_tokens.shape[0] > bounds[rank]:
            raise TooManyTokensError(f"at most {bounds[rank]} tokens on rank {rank}", str(rank_tokens.shape[0]))
