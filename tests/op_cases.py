"""Bodies of the op tests: run on every rank, on CPU (tests/multiprocess) and on GPUs (tests/multigpu) alike.

Every rank generates the data of all ranks from seeds, so the oracle needs no communication.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ep_a2a.config import FP8_DTYPE, EpDispatchCombineConfig, num_owned_experts
from ep_a2a.memory.arena import Arena
from ep_a2a.ops import EpDispatchCombineOp
from ep_a2a.quantization import quantize
from ep_a2a.reference import DispatchReference, combine_reference, combine_weights_reference, dispatch_reference
from ep_a2a.routing import ROUTINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep_a2a.testing import RankContext

POISON_BYTE = 0xC3


@dataclass(frozen=True)
class Case:
    """One op and the steps to run on it; `tokens` gives T by rank for each step, repeated as needed."""

    world_size: int = 4
    hidden_dim: int = 64
    topk: int = 2
    num_experts: int = 8
    max_tokens: int = 16
    dtype: torch.dtype = torch.bfloat16
    layout: str = "compact"
    routing: str = "uniform"
    tokens: tuple[tuple[int, ...], ...] = ((16,),)
    num_steps: int = 2
    quant_type: str = "none"
    scale_format: str = "float32"
    scale_dim: int = 0
    scale_dtype: torch.dtype = torch.float32
    with_weights: bool = True
    zero_copy: bool = False
    combine_weights: bool = True
    pad_id: int = -1
    max_num_tokens: tuple[int | None, ...] = (None,)
    first_epoch: int = 0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def config(self, rank: int, /, **changes: Any) -> EpDispatchCombineConfig:
        values: dict[str, Any] = {
            "data_type": self.dtype,
            "rank": rank,
            "world_size": self.world_size,
            "hidden_dim": self.hidden_dim,
            "scale_dim": self.scale_dim,
            "scale_type_size": self.scale_dtype.itemsize if self.scale_dim else 0,
            "max_token_type_size": 4,
            "max_num_inp_token_per_rank": self.max_tokens,
            "num_experts_per_rank": num_owned_experts(self.num_experts, self.world_size, rank),
            "num_experts_per_token": self.topk,
            "num_experts": self.num_experts,
            "layout": self.layout,
            "quant_type": self.quant_type,
            "scale_format": self.scale_format,
            "timeout_secs": 60.0,
        }
        return EpDispatchCombineConfig(**{**values, **self.options, **changes})

    def num_tokens(self, step: int, rank: int) -> int:
        counts = self.tokens[step % len(self.tokens)]
        return counts[rank % len(counts)]

    def stride(self, step: int) -> int | None:
        return self.max_num_tokens[step % len(self.max_num_tokens)]


@dataclass(frozen=True)
class Inputs:
    """One rank's inputs of a step, as given to dispatch."""

    tokens: torch.Tensor
    weights: torch.Tensor | None
    scales: torch.Tensor | None
    ids: torch.Tensor


def make_inputs(case: Case, step: int, rank: int) -> Inputs:
    generator = torch.Generator().manual_seed(1 + case.seed * 1_000_003 + step * 1009 + rank)
    num_tokens = case.num_tokens(step, rank)
    values = torch.randn(num_tokens, case.hidden_dim, generator=generator)
    tokens = quantize(values, "fp8_per_token")[0] if case.dtype == FP8_DTYPE else values.to(case.dtype)
    weights = torch.rand(num_tokens, case.topk, generator=generator) if case.with_weights else None
    scales = None
    if case.scale_dim:
        raw = torch.randint(0, 256, (num_tokens, case.scale_dim * case.scale_dtype.itemsize), generator=generator)
        scales = raw.to(torch.uint8).view(case.scale_dtype)
    ids = ROUTINGS[case.routing](num_tokens, case.topk, case.num_experts, case.world_size, generator)
    return Inputs(tokens, weights, scales, ids)


def reference_of(case: Case, step: int, everyone: Sequence[Inputs]) -> list[DispatchReference]:
    tokens = [inputs.tokens for inputs in everyone]
    scales = [inputs.scales for inputs in everyone]
    if case.quant_type != "none":
        pairs = [quantize(x, case.quant_type, case.scale_format) for x in tokens]
        tokens, scales = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return dispatch_reference(
        tokens,
        [inputs.weights for inputs in everyone],
        scales,
        [inputs.ids for inputs in everyone],
        num_experts=case.num_experts,
        max_num_tokens=case.stride(step) or case.max_tokens,
        layout=case.layout,
        stride_tokens=case.max_tokens,
        pad_id=case.pad_id,
    )


def same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    got = got.cpu().contiguous()
    expected = expected.contiguous()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (got, expected)]
        raise AssertionError(f"{what}: {kinds[0]} instead of {kinds[1]}")
    if got.numel() and not torch.equal(got.view(torch.uint8), expected.view(torch.uint8)):
        different = (got.view(torch.uint8) != expected.view(torch.uint8)).flatten(1).any(1).nonzero().flatten()
        first = int(different[0])
        rows = f"rows {different[:8].tolist()} of {got.shape[0]} differ"
        raise AssertionError(f"{what}: {rows}; first: {got[first]} instead of {expected[first]}")


def check_dispatched(case: Case, op: EpDispatchCombineOp, got: tuple[Any, ...], expected: DispatchReference) -> None:
    tokens, weights, scales, ids, total = got
    assert total.tolist() == [expected.total_recv], (total, expected.total_recv)
    same_bits(op.recv_counts, expected.counts_per_source.to(torch.int32), "counts")
    same_bits(expected.valid_rows(tokens), expected.valid_rows(expected.tokens), "tokens")
    same_bits(expected.valid_rows(ids), expected.valid_rows(expected.ids), "ids")
    padding = expected.padding_rows(ids).cpu()
    assert bool((padding == case.pad_id).all()), f"padding rows hold {padding.unique()} instead of {case.pad_id}"
    if expected.weights is None:
        assert weights is None
    else:
        same_bits(expected.valid_rows(weights), expected.valid_rows(expected.weights), "weights")
    if expected.scales is None:
        assert scales is None
    else:
        same_bits(expected.valid_rows(scales), expected.valid_rows(expected.scales), "scales")
    same_bits(op.get_dispatch_src_token_pos(), expected.valid_rows(expected.source_positions), "source positions")


def expert_rows(case: Case, dtype: torch.dtype, reference: DispatchReference, rank: int, step: int) -> torch.Tensor:
    """What the experts of a rank return for its valid rows: any numbers that every rank can recompute."""
    generator = torch.Generator().manual_seed(7 + case.seed + 31 * step + rank)
    return torch.randn(reference.total_recv, case.hidden_dim, generator=generator).to(dtype)


def place_rows(reference: DispatchReference, valid: torch.Tensor, target: torch.Tensor) -> None:
    """Writes valid rows into a tensor of the op's layout, [R, ·] or [W, m, ·], and poison everywhere else."""
    target.view(torch.uint8).fill_(POISON_BYTE)
    start = 0
    for source, count in enumerate(reference.counts_per_source.tolist()):
        reference.rows_of_source(target, source).copy_(valid[start : start + count])
        start += count


@dataclass
class Step:
    """One step of a case on this rank, between its dispatch and its combine."""

    case: Case
    op: EpDispatchCombineOp
    number: int
    device: torch.device
    ids: torch.Tensor
    counts: list[int]
    reference: list[DispatchReference]
    got: tuple[Any, ...]

    @classmethod
    def dispatch(cls, case: Case, op: EpDispatchCombineOp, number: int, device: torch.device) -> Step:
        everyone = [make_inputs(case, number, r) for r in range(case.world_size)]
        mine = everyone[op.config.rank]
        inputs = [None if t is None else t.to(device) for t in (mine.tokens, mine.weights, mine.scales, mine.ids)]
        got = op.dispatch(*inputs, max_num_tokens=case.stride(number), pad_id=case.pad_id)
        counts = [each.tokens.shape[0] for each in everyone]
        assert inputs[3] is not None
        return cls(case, op, number, device, inputs[3], counts, reference_of(case, number, everyone), got)

    def check_dispatched(self) -> None:
        check_dispatched(self.case, self.op, self.got, self.reference[self.op.config.rank])

    def combine(self) -> None:
        case, op, got, rank = self.case, self.op, self.got, self.op.config.rank
        dtype = op.config.combined_dtype
        all_rows = [expert_rows(case, dtype, each, r, self.number) for r, each in enumerate(self.reference)]
        shape = (*got[0].shape[:-1], case.hidden_dim)
        if case.zero_copy:
            flat = op.get_registered_combine_input_buffer(dtype)[: got[0].numel() // case.hidden_dim]
            rows = flat.view(shape)
        else:
            rows = torch.empty(shape, dtype=dtype, device=self.device)
        place_rows(self.reference[rank], all_rows[rank].to(self.device), rows)
        weights = got[1] if case.combine_weights else None
        result, result_weights = op.combine(rows, weights, self.ids)
        expected = combine_reference(all_rows, self.reference, self.counts, dtype)[rank]
        same_bits(result[: self.counts[rank]], expected, "combine")
        if weights is not None:
            weight_rows = [r.valid_rows(r.weights) for r in self.reference if r.weights is not None]
            summed = combine_weights_reference(weight_rows, self.reference, self.counts)[rank]
            assert result_weights is not None
            same_bits(result_weights[: self.counts[rank]], summed, "combined weights")


def run_step(case: Case, op: EpDispatchCombineOp, number: int, device: torch.device) -> None:
    step = Step.dispatch(case, op, number, device)
    step.check_dispatched()
    step.combine()


def make_op(
    context: RankContext, case: Case, arena: Arena, index: int | None = None, **changes: Any
) -> EpDispatchCombineOp:
    return EpDispatchCombineOp(case.config(context.rank, **changes), arena=arena, index=index)


def run_case(context: RankContext, case: Case) -> None:
    """Every step of the case on one op, against the oracle."""
    with Arena(context.group, context.device) as arena:
        op = make_op(context, case, arena)
        if case.first_epoch:
            op._meet("setting the epoch", lambda: op._memory.set_epoch(case.first_epoch))
        for number in range(case.num_steps):
            run_step(case, op, number, context.device)
        op.check()
